"""The shard: worker process of one rank, which runs the model on one accelerator. It only computes."""

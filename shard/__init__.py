"""The shard: one accelerator's half of the work. It only computes."""

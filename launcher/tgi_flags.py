"""Flags of text-generation-inference that penstock lacks, and what is said of each. Knows nothing of how penstock's flags are
read."""

# Names as in the environment, in lower case. A flag that penstock gets moves to `options.py`.
IGNORED = {
    "validation_workers": "prompts are tokenized on as many threads as they need",
    "trust_remote_code": "code that comes with a model is never run",
    "prometheus_port": "the metrics are at /metrics on --port",
    "disable_custom_kernels": "kernels are chosen by what the device can do",
    "watermark_gamma": "requests that ask for a watermark are refused",
    "watermark_delta": "requests that ask for a watermark are refused",
    "ngrok_authtoken": "there is no tunnel",
    "ngrok_edge": "there is no tunnel",
    "usage_stats": "no usage statistics are sent, ever",
    "disable_usage_stats": "no usage statistics are sent, ever",
    "disable_crash_reports": "no crash reports are sent, ever",
    "enable_prefill_logprobs": "a request's `decoder_input_details` is enough",
}
REFUSED = {
    "weights_cache_override": "name the folder that holds config.json and the weights with --model-id",
    "rope_scaling": "write rope_scaling into the config.json of a copy of the model, and name that folder with --model-id",
    "rope_factor": "write rope_scaling into the config.json of a copy of the model, and name that folder with --model-id",
    "tokenizer_config_path": "write its chat_template into a file of its own, and name that with --chat-template",
    "ngrok": "there is no tunnel: run `ngrok http PORT` beside the server",
}

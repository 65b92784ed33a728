"""Flags and environment variables of `penstock serve`: parsing, precedence, error messages, and the settings that they become."""

import dataclasses
import os
from pathlib import Path

import pytest

from penstock.bench import flags as bench_flags
from penstock.launcher import cli, command_line, option_types, options
from penstock.launcher.errors import UsageError
from penstock.launcher.options import Options
from penstock.router.config import RouterConfig
from penstock.shard.config import ShardConfig


def parse(line: str, **environment: str) -> Options:
    return command_line.parse(cli._parsers()[1]["serve"], line.split(), environment)


def test_leading_zeros_and_sizes_above_4_gib_are_accepted() -> None:
    assert parse(f"--kv-pages {'0' * 30}5").kv_pages == 5
    assert parse("--payload-limit-total 8589934592").payload_limit_total == 1 << 33


def test_defaults_without_flags() -> None:
    assert parse("") == Options()
    assert parse("").port == 3000
    assert parse("").hostname == "0.0.0.0"


def test_flags_set_their_options() -> None:
    options_read = parse(
        "some/model -p 8080 --num-shard 2 --json-output --waiting-served-ratio 1.2 --sharded true --dtype bfloat16"
    )
    expected = Options(
        model_id="some/model",
        port=8080,
        num_shard=2,
        json_output=True,
        waiting_served_ratio=1.2,
        sharded=True,
        dtype="bfloat16",
    )
    assert options_read == expected


NEED_ANOTHER_OPTION = ("max_input_tokens", "replicas", "no_router", "shard_listen")  # an error when set alone


def test_every_option_is_read_from_its_variable() -> None:
    samples = {
        option_types.count: "1",
        option_types.size: "300000000",
        option_types.threads: "1",
        option_types.port: "7",
        option_types.fraction: "0.5",
        option_types.seconds: "0.5",
        option_types.positive: "0.5",
        option_types.limit: "0",
        option_types.pixels: "5000",
        option_types.hosts: "a.example",
        option_types.path: "/text",
        option_types.file: str(Path(__file__).resolve()),
        option_types.graphs: "1,2",
        option_types.speculation: "3",
        option_types.rank_groups: "a:1",
        option_types.origins: "https://a.example",
        option_types.url: "http://localhost:4318",
        str: "text",
    }
    for name, field in options.FIELDS.items():
        if not field.metadata["environment"] or name in NEED_ANOTHER_OPTION:
            continue
        if name == "itl_target":
            assert parse("", ITL_TARGET="40").itl_target == 0.04
            continue
        choices = field.metadata["choices"]
        text = choices[-1] if choices else "127.0.0.1" if name == "hostname" else samples.get(field.metadata["kind"], "true")
        text = "true" if field.metadata["switch"] else text
        options_read = parse("", **{name.upper(): text})
        assert str(getattr(options_read, name)).lower() == text.lower(), name


def test_help_names_the_variables_that_are_not_read() -> None:
    text = cli._parsers()[1]["serve"].format_help()
    assert "Every flag" not in text
    for name, field in options.FIELDS.items():
        assert field.metadata["environment"] or name.upper() in text


def test_help_is_as_wide_as_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to 118 columns. Lines that a narrow terminal wraps by itself can't be read."""
    for columns, widest in (("60", 60), ("300", 118)):
        monkeypatch.setenv("COLUMNS", columns)
        for text in (cli._parsers()[1]["serve"].format_help(), bench_flags.make_parser().format_help().partition("examples:")[0]):
            flags = [line for line in text.splitlines() if line.startswith(("  -", " " * 20))]
            assert widest - 6 < max(map(len, flags)) <= widest


def test_every_kind_of_value_but_text_has_a_placeholder_in_the_help() -> None:
    """The placeholders of other kinds in the help, such as numbers, are in `option_types.METAVARS`."""
    kinds_of_text = {field.metadata["kind"] for field in options.FIELDS.values()} - set(option_types.METAVARS)
    assert kinds_of_text == {str}


def test_env_is_read_as_a_flag_but_not_as_a_variable() -> None:
    assert not parse("", ENV="production").env
    assert parse("-e").env


def test_flag_overrides_its_variable() -> None:
    assert parse("--port 1", PORT="2").port == 1
    assert parse("--max-input-length 5", MAX_INPUT_TOKENS="6").max_input_tokens == 5
    assert parse("here", MODEL_ID="there").model_id == "here"
    assert parse("", PORT="").port == 3000  # an empty variable counts as unset


def test_whitespace_around_a_variables_value_is_stripped() -> None:
    """A secret that is mounted as a file ends with a newline."""
    options_read = parse("", MAX_TOTAL_TOKENS="4096\n", DTYPE=" float32 ", DISABLE_GRAMMAR_SUPPORT="true\r\n", MODEL_ID="a/b\n")
    assert options_read == Options(max_total_tokens=4096, dtype="float32", disable_grammar_support=True, model_id="a/b")


def test_hostname_variable_is_used_only_if_it_is_an_ip_address() -> None:
    assert parse("", HOSTNAME="a1b2c3").hostname == "0.0.0.0"
    assert parse("", HOSTNAME="127.0.0.1").hostname == "127.0.0.1"
    assert parse("", HOSTNAME="::1").hostname == "::1"


def test_address_is_read_however_it_is_written() -> None:
    """:: is listened on by IPv4 as well."""
    assert parse("--hostname ::0").hostname == parse("--hostname 0:0:0:0:0:0:0:0").hostname == "::"


@pytest.mark.parametrize(
    ("line", "environment", "error"),
    [
        ("", {"MAX_INPUT_TOKENS": "many"}, "MAX_INPUT_TOKENS=many: a whole number from 1 is needed"),
        ("--port 70000", {}, "--port=70000: a port is at most 65535"),
        ("--port 0", {}, "--port=0: a whole number from 1 is needed"),
        ("--kv-pages 5000000000", {}, "--kv-pages=5000000000: 2,147,483,648 is the most there can be"),
        (f"--max-restarts {'9' * 5000}", {}, "2,147,483,648 is the most there can be"),
        ("--cuda-memory-fraction 1.5", {}, "--cuda-memory-fraction=1.5: a number above 0 and up to 1 is needed"),
        ("--cuda-memory-fraction x", {}, "--cuda-memory-fraction=x: a number is needed"),
        ("--waiting-served-ratio nan", {}, "--waiting-served-ratio=nan: a number from 0 is needed"),
        ("", {"DTYPE": "int4"}, "DTYPE=int4: one of auto, float32, bfloat16, float16 is needed"),
        ("", {"JSON_OUTPUT": "maybe"}, "JSON_OUTPUT=maybe: true or false is needed"),
        ("--json-output=true", {}, "--json-output=true: a switch takes no value: write --json-output, or leave it out"),
        ("--api-key ,", {}, "--api-key=,: there is no key in it; leave it out for a server that asks for none"),
        ("--admin-key= ", {}, "--admin-key=: there is no key in it; leave it out for a server that asks for none"),
        ("", {"API_KEY": "\n"}, "API_KEY=: there is no key in it; leave it out for a server that asks for none"),
        ("", {"API_KEY": "a\nb"}, "API_KEY=...: a key has letters, digits and signs of ASCII only, since HTTP carries no others"),
        ("--admin-key \u20ac", {}, "--admin-key=...: a key has letters, digits and signs of ASCII only"),
        ("--hostname nowhere", {}, "--hostname=nowhere: an IP address of this machine is needed, or localhost, or 0.0.0.0 for all"),
        ("--max-total-token 5", {}, "no flag --max-total-token: did you mean --max-total-tokens?"),
        ("--max-totl-tokens=5", {}, "did you mean --max-total-tokens?"),
        ("--max 5", {}, "no flag --max"),  # no abbreviations: a later flag could change their meaning
        ("-g 1e300", {}, "--graceful-termination-timeout=1e300: 1,000,000,000 is the most there can be"),
        ("--step-timeout inf", {}, "--step-timeout=inf: 1,000,000,000 is the most there can be"),
        ("--node-timeout nan", {}, "--node-timeout=nan: a number above 0 is needed"),
        ("--threads 100000", {}, f"is the most there can be: this machine has cores: {os.cpu_count()}"),
        ("--verison", {}, "no flag --verison: did you mean --version?"),
        ("--speculate 200", {}, "--speculate=200: 127 is the most there can be"),
        ("--batch-invariant --threads 2", {}, "one thread for each rank, lest sums be divided: leave --threads out"),
        ("--batch-invariant --speculate draft=demo-draft,tree=2x2", {}, "--batch-invariant needs a chain of drafts"),
        ("--batch-invariant --speculate draft=demo-draft,nodes=8", {}, "with a draft model's tokens=K, or ngram=K"),
        ("--batch-invariant --speculate draft=demo-draft,ngram=2", {}, "--batch-invariant needs a chain of drafts"),
        (
            "--batch-invariant --speculate draft=demo-draft,verify=rejection",
            {},
            "--batch-invariant and --speculate verify=rejection: take verify=gumbel",
        ),
        ("--xyzzy", {}, "no flag --xyzzy (penstock serve --help lists what there is)"),
        ("--rope-factor 2", {}, "--rope-factor is text-generation-inference's, penstock has no such flag"),
        ("--quantize eetq", {}, "--quantize=eetq: one of int4, int8, fp8, gptq, awq, compressed-tensors is needed"),
        ("one two", {}, "two is one argument too many"),
        ("one --model-id two", {}, "MODEL says one and --model-id says two"),
        ("--port", {}, "expected one argument (penstock serve --help lists what there is)"),
        ("--max-input-tokens 5 --max-input-length 5", {}, "--max-input-tokens and --max-input-length mean the same"),
        ("", {"MAX_INPUT_TOKENS": "5", "MAX_INPUT_LENGTH": "5"}, "MAX_INPUT_TOKENS and MAX_INPUT_LENGTH mean the same"),
        ("--max-input-tokens 5 --max-total-tokens 5", {}, "--max-input-tokens 5 must be below --max-total-tokens 5"),
        ("--payload-limit 1000000000", {}, "is more than all bodies together may have: raise --payload-limit-total 512000000"),
        ("--max-best-of 8 --max-batch-size 4", {}, "--max-best-of 8 answers could not run at once: raise --max-batch-size 4"),
        ("--num-beams 9", {}, "--num-beams 9 is more than --max-num-beams 8: lower it, or raise the other"),
        ("--num-beams 4 --max-batch-size 2", {}, "4 beams of a request could not run at once: raise --max-batch-size to 4"),
        ("--max-num-beams 200", {}, "200 beams of a request could not run at once: raise --max-batch-size to 200"),
        ("--kv-pages 8 --max-batch-total-tokens 64", {}, "--kv-pages 8 of 16 tokens and --max-batch-total-tokens 64 both say"),
        *(
            (f"--otlp-endpoint {url}", {}, f"--otlp-endpoint={url}: a URL such as http://localhost:4318 is needed")
            for url in ("here:4318", "ftp://here", "http://", "http://[::1", "http://here:99999", "http://here:0", "http://:1")
        ),
        ("--itl-target 0", {}, "--itl-target=0: a number of milliseconds above 0 is needed"),
        ("--itl-target 20 --prefill-policy pause", {}, "--itl-target is for --prefill-policy mixed"),
        ("--prefix-caching maybe", {}, "--prefix-caching=maybe: one of on, off is needed"),
        ("--sharded false --num-shard 2", {}, "contradict each other"),
        ("--sharded true --num-shard 1", {}, "contradict each other"),
        ("--revision=", {}, "--revision is empty: give it a value, or leave it out"),
        ("--lora-adapters=", {}, "--lora-adapters is empty"),
    ],
)
def test_invalid_options_are_refused_in_one_line(line: str, environment: dict[str, str], error: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(line, **environment)
    assert error in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("arguments", [[""], ["--model-id", ""], ["--model-id="]])
def test_empty_model_is_refused_instead_of_serving_the_demo_model(arguments: list[str]) -> None:
    with pytest.raises(UsageError, match="MODEL is empty: name a folder or a hub id"):
        command_line.parse(cli._parsers()[1]["serve"], arguments, {})


def test_file_that_is_a_link_to_itself_is_refused(tmp_path: Path) -> None:
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    with pytest.raises(UsageError, match="there is no such file"):
        parse(f"--chat-template {loop}")


def test_kv_pages_and_max_batch_total_tokens_may_both_be_given_if_they_agree() -> None:
    assert parse("--kv-pages 8 --max-batch-total-tokens 135").pool_pages == 8  # 16 tokens each


def test_every_flag_has_an_effect() -> None:
    """Each one is a setting of the router or the shards, or is listed here as used by the launcher itself."""
    launcher_only = {
        *("model_id", "huggingface_hub_cache", "num_shard", "sharded", "shard_uds_path", "cuda_memory_fraction", "env"),
        "cluster",  # used by plan
        *("nnodes", "node_rank", "node_addr", "node_timeout", "insecure_nodes"),  # which machine runs which processes
        *("replicas", "replica", "no_router", "shard_listen"),
        "max_restarts",
        *("penstock_kernels", "api_key", "max_batch_total_tokens"),  # become the settings kernels, api_keys and kv_pages
        "lora_adapters",  # the names become `adapters` of router and shards
    }
    settings = {field.name for config in (RouterConfig, ShardConfig) for field in dataclasses.fields(config)}
    assert set(options.FIELDS) - settings == launcher_only


def test_every_setting_of_the_router_has_a_flag() -> None:
    set_by_launcher = {
        "folder",
        "model",
        "groups",
        "hang_reports",
        "api_keys",
        "adapters",
        "images_asked",
    }  # set by the launcher itself
    assert {field.name for field in dataclasses.fields(RouterConfig)} - set(options.FIELDS) == set_by_launcher


def test_options_that_only_shards_read() -> None:
    assert {*options.SHARDS} - {field.name for field in dataclasses.fields(ShardConfig)} >= options.RENAMED
    assert {"dtype", "kv_pages", "load_format", "overlap", "threads"} <= {*options.SHARDS}
    assert {*options.SHARDS}.isdisjoint({"max_loras", "tls_cert", "json_output", "master_port", "nnodes", "replica", "port"})


@pytest.mark.parametrize("columns", ["80", "120"])
def test_help_shows_every_flag_and_default(monkeypatch: pytest.MonkeyPatch, columns: str) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    text = " ".join(cli._parsers()[1]["serve"].format_help().split())
    for name, field in options.FIELDS.items():
        assert options.flag(name) in text
        if field.default not in (0, "", None):
            assert f"(default: {field.default})" in text

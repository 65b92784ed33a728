"""`text-generation-launcher`: every flag and environment variable of TGI 3.3 is translated, ignored with a remark, or refused."""

import json
import os
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from penstock.launcher import children, cli, command_line, machine, options, tgi
from penstock.launcher.errors import UsageError
from penstock.launcher.gpus import Gpus
from penstock.launcher.machine import Machine
from penstock.launcher.options import Options
from penstock.tests import serving

# TGI 3.3's flags, with a value for each that penstock accepts; None: a switch.
FLAGS: dict[str, str | None] = {
    "--model-id": "some/model",
    "--revision": "main",
    "--validation-workers": "2",
    "--sharded": "false",
    "--num-shard": "1",
    "--quantize": "gptq",
    "--lora-adapters": "a/b,c=d/e@f",
    "--speculate": "0",
    "--dtype": "bfloat16",
    "--kv-cache-dtype": "fp8_e4m3fn",
    "--trust-remote-code": None,
    "--max-concurrent-requests": "200",
    "--max-best-of": "3",
    "--max-stop-sequences": "5",
    "--max-top-n-tokens": "6",
    "--max-input-tokens": "100",
    "--max-total-tokens": "200",
    "--waiting-served-ratio": "1.2",
    "--max-batch-prefill-tokens": "300",
    "--max-batch-total-tokens": "4096",
    "--max-waiting-tokens": "10",
    "--max-batch-size": "8",
    "--cuda-graphs": "1,2,4",
    "--hostname": "127.0.0.1",
    "--port": "8080",
    "--prometheus-port": "9001",
    "--shard-uds-path": "/tmp/text-generation-server",
    "--master-addr": "localhost",
    "--master-port": "29501",
    "--huggingface-hub-cache": "/data",
    "--disable-custom-kernels": None,
    "--cuda-memory-fraction": "0.5",
    "--rope-factor": "1.0",
    "--json-output": None,
    "--otlp-endpoint": "http://localhost:4319",
    "--otlp-service-name": "tgi",
    "--cors-allow-origin": "https://a.example",
    "--api-key": "secret",
    "--watermark-gamma": "0.5",
    "--watermark-delta": "2.0",
    "--ngrok-authtoken": "x",
    "--ngrok-edge": "x",
    "--disable-grammar-support": None,
    "--env": None,
    "--max-client-batch-size": "7",
    "--usage-stats": "off",
    "--payload-limit": "1000000",
    "--enable-prefill-logprobs": None,
    "--graceful-termination-timeout": "30",
    "--disable-usage-stats": None,  # of older versions of TGI
    "--disable-crash-reports": None,
}
# Values that would change what a model computes. (--max-input-length is the older name of --max-input-tokens.)
REFUSED = {
    "--quantize": "exl2",
    "--weights-cache-override": "/weights",
    "--rope-scaling": "dynamic",
    "--rope-factor": "2.0",
    "--tokenizer-config-path": "/file.json",
    "--ngrok": None,
}
EXPECTED = Options(
    model_id="some/model",
    revision="main",
    sharded=False,
    num_shard=1,
    quantize="gptq",
    lora_adapters="a/b,c=d/e@f",
    speculate="0",
    dtype="bfloat16",
    kv_cache_dtype="fp8_e4m3fn",
    cuda_graphs="1,2,4",
    max_concurrent_requests=200,
    max_best_of=3,
    max_stop_sequences=5,
    max_top_n_tokens=6,
    max_input_tokens=100,
    max_total_tokens=200,
    waiting_served_ratio=1.2,
    max_batch_prefill_tokens=300,
    max_batch_total_tokens=4096,
    max_waiting_tokens=10,
    max_batch_size=8,
    hostname="127.0.0.1",
    port=8080,
    shard_uds_path="/tmp/text-generation-server",
    master_addr="localhost",
    master_port=29501,
    huggingface_hub_cache="/data",
    cuda_memory_fraction=0.45,
    json_output=True,
    api_key="secret",
    disable_grammar_support=True,
    otlp_endpoint="http://localhost:4319",
    otlp_service_name="tgi",
    cors_allow_origin="https://a.example",
    max_client_batch_size=7,
    payload_limit=1_000_000,
    graceful_termination_timeout=30.0,
)


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "inspect", lambda: Machine(cores=1, memory=1 << 30, fast_bfloat16=False))


def translate_and_parse(*arguments: str, **environment: str) -> tuple[Options, list[str]]:
    """The options that `penstock serve` gets, and the remarks to the operator."""
    translated = tgi.translate(arguments, environment)
    parser = cli._parsers()[1]["serve"]
    return command_line.parse(parser, translated.arguments, environment | translated.environment), translated.remarks


def test_limits_of_0_are_accepted() -> None:
    parsed, _ = translate_and_parse(
        "--max-stop-sequences", "0", "--waiting-served-ratio", "0", MAX_TOP_N_TOKENS="0", MAX_WAITING_TOKENS="0"
    )
    assert (parsed.max_stop_sequences, parsed.max_top_n_tokens) == (0, 0)
    assert (parsed.waiting_served_ratio, parsed.max_waiting_tokens) == (0.0, 0)


def command_line_of(flags: dict[str, str | None]) -> list[str]:
    return [part for name, value in flags.items() for part in ([name] if value is None else [name, value])]


def options_of_tgi(parsed: Options) -> dict[str, object]:
    """The options that TGI has, too, but for --env, which is not read as a variable."""
    names = {name[2:].replace("-", "_") for name in FLAGS} & set(options.FIELDS)
    return {name: getattr(parsed, name) for name in names - {"env"}}


def test_every_flag_is_accepted() -> None:
    parsed, remarks = translate_and_parse(*command_line_of(FLAGS))
    assert options_of_tgi(parsed) == options_of_tgi(EXPECTED)
    assert parsed.env
    ignored = {name for name in FLAGS if name[2:].replace("-", "_") not in options.FIELDS} - {"--rope-factor"}
    assert {remark.partition(" has no effect: ")[0] for remark in remarks} == ignored


def test_every_variable_is_accepted() -> None:
    environment = {name[2:].replace("-", "_").upper(): value or "true" for name, value in FLAGS.items()}
    parsed, remarks = translate_and_parse(**environment)
    assert options_of_tgi(parsed) == options_of_tgi(EXPECTED)
    assert not parsed.env, "other programs set ENV"
    assert any(remark.startswith("VALIDATION_WORKERS has no effect") for remark in remarks)


def test_flags_with_equal_signs_and_short_flags_are_accepted() -> None:
    parsed, remarks = translate_and_parse(
        "-p", "81", "-g", "5", "--validation-workers=4", "--max-input-length=9", "-e", "--model-id=x"
    )
    assert (parsed.port, parsed.graceful_termination_timeout, parsed.max_input_tokens, parsed.model_id) == (81, 5.0, 9, "x")
    assert parsed.env
    assert len(remarks) == 1


@pytest.mark.parametrize(("name", "value"), REFUSED.items())
def test_options_that_would_change_the_computation_are_refused(name: str, value: str | None) -> None:
    for arguments, environment, source in (
        ([name] if value is None else [name, value], {}, name),
        ([], {name[2:].replace("-", "_").upper(): value or "true"}, name[2:].replace("-", "_").upper()),
    ):
        with pytest.raises(UsageError) as caught:
            translate_and_parse(*arguments, **environment)
        assert str(caught.value).startswith(source if value is None else f"{source}={value}")
        assert "penstock lacks it: " in str(caught.value)
        assert "\n" not in str(caught.value)


def test_translation_tables_have_none_of_penstocks_options() -> None:
    """A remark that penstock ignores or lacks one of its own options would be wrong."""
    assert not set(options.FIELDS) & {*tgi.IGNORED, *tgi.REFUSED, *map(str.lower, tgi.VARIABLES)}


def test_flag_overrides_its_variable_and_false_switches_give_no_remark() -> None:
    parsed, remarks = translate_and_parse(
        "--port", "81", PORT="82", TRUST_REMOTE_CODE="false", NGROK="0", DISABLE_GRAMMAR_SUPPORT="off"
    )
    assert parsed.port == 81
    assert not parsed.disable_grammar_support
    assert remarks == []
    assert not translate_and_parse("--speculate", "0", SPECULATE="3")[0].speculation.most


def test_variables_without_a_flag_are_translated() -> None:
    parsed, remarks = translate_and_parse(PREFIX_CACHING="0", PREFILL_CHUNKING="0", ATTENTION="flashinfer")
    assert (parsed.prefix_caching, parsed.prefill_policy) == ("off", "pause")
    assert any(remark.startswith("ATTENTION has no effect") for remark in remarks)
    assert "--payload-limit" in translate_and_parse(MAX_IMAGE_FETCH_SIZE="1000")[1][0]
    parsed, _ = translate_and_parse(PREFIX_CACHING="true", PREFILL_CHUNKING="1")
    assert (parsed.prefix_caching, parsed.prefill_policy) == ("on", "mixed")
    assert translate_and_parse("--prefix-caching", "on", PREFIX_CACHING="0")[0].prefix_caching == "on"


@pytest.mark.parametrize(
    ("value", "level"),
    [
        ("debug", "debug"),
        ("WARN", "warning"),
        ("trace", "debug"),
        ("info,text_generation_router=debug", "info"),
        ("x=debug", "info"),
    ],
)
def test_log_levels_are_translated(value: str, level: str) -> None:
    assert translate_and_parse(LOG_LEVEL=value) == (Options(log_level=level), [])
    assert translate_and_parse("--log-level", "error", LOG_LEVEL=value)[0].log_level == "error"


def test_otlp_port_for_grpc_becomes_the_one_for_http() -> None:
    for found in (
        translate_and_parse("--otlp-endpoint", "http://here:4317"),
        translate_and_parse(OTLP_ENDPOINT="http://here:4317/"),
    ):
        assert found[0].otlp_endpoint == "http://here:4318"
        assert len(found[1]) == 1


def test_otlp_endpoint_without_a_scheme_is_accepted() -> None:
    parsed, [remark] = translate_and_parse(OTLP_ENDPOINT="collector:4317\n")
    assert parsed.otlp_endpoint == "http://collector:4318"
    assert remark == "traces go over OTLP/HTTP: to http://collector:4318 instead of collector:4317"
    with pytest.raises(UsageError, match=r"^OTLP_ENDPOINT=grpc://collector:4317: a URL such as .* is needed$"):
        translate_and_parse(OTLP_ENDPOINT="grpc://collector:4317")
    with pytest.raises(UsageError, match=r"^--otlp-endpoint=a b: a URL"):
        translate_and_parse("--otlp-endpoint", "a b", OTLP_ENDPOINT="http://other")


def test_whitespace_around_variables_is_stripped() -> None:
    parsed, remarks = translate_and_parse(MAX_TOTAL_TOKENS="4096\n", HF_MODEL_ID="a/b\n", JSON_OUTPUT="0\n", QUANTIZE="")
    assert (parsed, remarks) == (Options(max_total_tokens=4096, model_id="a/b"), [])


@pytest.mark.parametrize(("value", "json_output"), [("", False), ("false\n", False), ("yes", True)])
def test_remarks_are_json_with_json_output(
    value: str, json_output: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "main", lambda arguments: 0)
    environment = {"JSON_OUTPUT": value, "VALIDATION_WORKERS": "2"}
    assert tgi._serve(tgi.translate([], environment), environment) == 0
    assert capsys.readouterr().out.startswith("{" if json_output else "penstock: VALIDATION_WORKERS has no effect")


def test_cors_allow_origin_may_be_repeated() -> None:
    parsed, _ = translate_and_parse("--cors-allow-origin", "https://a.example", "--cors-allow-origin=https://b.example")
    assert parsed.cors_allow_origin == "https://a.example,https://b.example"


def test_memory_fraction_is_multiplied_by_tgis_wiggle_room() -> None:
    assert translate_and_parse()[0].cuda_memory_fraction == 0.9
    assert translate_and_parse(CUDA_MEMORY_FRACTION="1.0")[0].cuda_memory_fraction == 0.9
    assert translate_and_parse("--cuda-memory-fraction", "0.5", TGI_WIGGLE_ROOM="0.8")[0].cuda_memory_fraction == 0.4
    assert translate_and_parse(TGI_WIGGLE_ROOM="0.8")[0].cuda_memory_fraction == 0.8
    with pytest.raises(UsageError, match="a number above 0"):
        translate_and_parse("--cuda-memory-fraction", "2")


def test_hostname_that_is_no_ip_address_is_replaced_by_0_0_0_0() -> None:
    assert translate_and_parse("--hostname", "myhost") == (Options(), ["--hostname myhost is no IP address: listening on 0.0.0.0"])
    assert translate_and_parse(HOSTNAME="pod-7") == (Options(), [])
    assert translate_and_parse(HOSTNAME="127.0.0.1")[0].hostname == "127.0.0.1"


def test_model_is_sharded_over_all_gpus_if_a_variable_names_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        machine, "inspect", lambda: Machine(cores=1, memory=1 << 30, fast_bfloat16=False, gpus=Gpus((1 << 34, 1 << 34)))
    )
    assert translate_and_parse(NVIDIA_VISIBLE_DEVICES="all")[0].sharded
    assert translate_and_parse(CUDA_VISIBLE_DEVICES="0,1")[0].sharded
    assert translate_and_parse(HIP_VISIBLE_DEVICES="0,1")[0].sharded
    assert translate_and_parse()[0].sharded is None, "one GPU, as in TGI, unless a variable names more"
    assert translate_and_parse(NVIDIA_VISIBLE_DEVICES="all", NUM_SHARD="1")[0].sharded is None
    assert translate_and_parse("--sharded", "false", NVIDIA_VISIBLE_DEVICES="all")[0].sharded is False


def test_variables_of_cloud_providers_are_accepted() -> None:
    parsed, remarks = translate_and_parse(
        HF_MODEL_ID="a/b", HF_MODEL_REVISION="r", SM_NUM_GPUS="2", HF_MODEL_TRUST_REMOTE_CODE="true"
    )
    assert (parsed.model_id, parsed.revision, parsed.num_shard) == ("a/b", "r", 2)
    assert remarks == ["TRUST_REMOTE_CODE has no effect: code that comes with a model is never run"]
    parsed, _ = translate_and_parse(AIP_HTTP_PORT="8080", AIP_PREDICT_ROUTE="/v1/endpoints/1:predict", AIP_HEALTH_ROUTE="/ready")
    assert (parsed.port, parsed.aip_predict_route, parsed.aip_health_route) == (8080, "/v1/endpoints/1:predict", "/ready")
    assert translate_and_parse(MODEL_ID="mine", HF_MODEL_ID="theirs")[0].model_id == "mine"
    assert translate_and_parse(HF_MODEL_QUANTIZE="awq\n")[0].quantize == "awq"


def test_quantization_libraries_are_mapped_to_int8_or_refused() -> None:
    for name in ("bitsandbytes", "eetq"):
        parsed, remarks = translate_and_parse("--quantize", name)
        assert parsed.quantize == "int8"
        assert remarks == [f"--quantize={name} rounds weights as penstock's int8 does"]
    assert translate_and_parse(QUANTIZE="fp8")[0].quantize == "fp8"
    assert translate_and_parse("--quantize", "int4", QUANTIZE="marlin")[0].quantize == "int4"
    with pytest.raises(
        UsageError, match=r"^QUANTIZE=marlin is text-generation-inference's, and penstock lacks it: leave it out if"
    ):
        translate_and_parse(QUANTIZE="marlin")


def test_hf_api_token_is_accepted_as_hf_token() -> None:
    assert tgi.translate([], {"HF_API_TOKEN": "t"}).environment["HF_TOKEN"] == "t"
    assert "HF_TOKEN" not in tgi.translate([], {"HF_API_TOKEN": "t", "HF_TOKEN": "u"}).environment
    assert "HF_API_TOKEN" not in children.environment({"HF_API_TOKEN": "t"}, 1)


# Run as a command


def launcher(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "penstock.launcher.tgi", *arguments],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_help_and_version() -> None:
    answer = launcher("--help")
    assert answer.returncode == 0
    assert all(name in answer.stdout for name in (FLAGS | REFUSED))
    assert launcher("--version").stdout.startswith("text-generation-launcher of penstock ")


def test_invalid_flags_end_with_one_line_and_exit_code_2() -> None:
    for arguments, error in (
        (["--quantize", "exl2"], "--quantize=exl2 is text-generation-inference's"),
        (["--quantize", "gptq"], "--quantize gptq, but the checkpoint is not quantized"),
        (["--kv-cache-dtype", "fp8_e5m2"], "--kv-cache-dtype=fp8_e5m2: one of auto, fp8_e4m3fn is needed"),
        (["--portt", "1"], "no flag --portt: did you mean --port?"),
        (["--max-input-tokens", "x"], "--max-input-tokens=x: a whole number from 1 is needed"),
    ):
        answer = launcher(*arguments)
        assert (answer.returncode, answer.stdout) == (2, "")
        assert error in answer.stderr
        assert len(answer.stderr.splitlines()) == 1


def info(server: serving.Server) -> dict[str, object]:
    with urllib.request.urlopen(f"{server.url}/info", timeout=10) as answer:
        found: dict[str, object] = json.load(answer)
    return found


@pytest.fixture
def cpu_environment() -> dict[str, str]:
    """Settings for a CPU that is shared with other tests."""
    return {"DEVICE": "cpu", "THREADS": "1"}


def test_server_serves_with_the_settings_of_tgis_flags(cpu_environment: dict[str, str]) -> None:
    flags = ("--validation-workers", "3", "--max-input-tokens", "50", "--max-total-tokens", "60", "--max-concurrent-requests", "9")
    with serving.serve(*flags, environment=cpu_environment) as server:
        found = info(server)
        assert (found["max_input_tokens"], found["max_total_tokens"], found["max_concurrent_requests"]) == (50, 60, 9)
        assert server.log.count("--validation-workers has no effect") == 1


def test_server_serves_with_the_settings_of_tgis_variables(cpu_environment: dict[str, str], tmp_path: Path) -> None:
    model = Path(tgi.__file__).parents[1] / "demo" / "model"
    environment = {
        "MODEL_ID": str(model),
        "MAX_INPUT_LENGTH": "40",
        "MAX_TOTAL_TOKENS": "50",
        "HOSTNAME": "a-pod",
        "NUM_SHARD": "1",
    }
    environment |= {"HUGGINGFACE_HUB_CACHE": str(tmp_path), "JSON_OUTPUT": "true", "USAGE_STATS": "off"}
    with serving.serve(environment=environment | cpu_environment, stop=signal.SIGTERM) as server:
        found = info(server)
        assert (found["model_id"], found["max_input_tokens"], found["max_total_tokens"]) == (str(model), 40, 50)
        lines = [json.loads(line) for line in server.log.splitlines()]
        assert any("USAGE_STATS has no effect" in line["message"] for line in lines)

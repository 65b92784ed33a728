"""The `text-generation-launcher` command: TGI's flags and environment variables are translated into those of `penstock serve`.

What penstock has by the same name passes unchanged (`options.py`). Here is the rest: what has no effect and is reported in a line
each, what would change how a model computes and is refused with a remedy (`tgi_flags.py` lists both), and what only has another
form.
"""

import argparse
import functools
import importlib.metadata
import os
import re
import sys
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass

from . import cli, command_line, machine, option_types, options, standard_streams
from .console import Console
from .errors import UsageError
from .options import flag
from .tgi_flags import IGNORED, REFUSED

PROGRAM = "text-generation-launcher"
SHOWING = ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
WIGGLE_ROOM = 0.9  # TGI uses this share of the memory that --cuda-memory-fraction names, unless TGI_WIGGLE_ROOM says another

SWITCHES = {
    *("trust_remote_code", "disable_custom_kernels", "disable_usage_stats", "disable_crash_reports", "enable_prefill_logprobs"),
    "ngrok",
}
NEUTRAL = {"rope_factor": ("1", "1.0")}  # values of refused flags that ask for nothing
VARIABLES = {  # variables that TGI reads, and that are no flags
    "ATTENTION": "attention is chosen by the device",
    "USE_FLASH_ATTENTION": "attention is chosen by the device",
    "COMPUTE_TYPE": "x-compute-type says penstock",
    "MAX_IMAGE_FETCH_SIZE": "an image may have as many bytes as a body, --payload-limit",
}
ALIASES = {  # names of the same variables in the images for SageMaker and Vertex AI, and in older versions
    "HF_MODEL_ID": "MODEL_ID",
    "HF_MODEL_REVISION": "REVISION",
    "SM_NUM_GPUS": "NUM_SHARD",
    "HF_MODEL_QUANTIZE": "QUANTIZE",
    "HF_MODEL_TRUST_REMOTE_CODE": "TRUST_REMOTE_CODE",
    "AIP_HTTP_PORT": "PORT",
    "HF_API_TOKEN": "HF_TOKEN",
}
# Values of --quantize that penstock calls otherwise, and those that it lacks.
METHODS = {"eetq": "int8", "bitsandbytes": "int8"}
LACKING = ("exl2", "marlin", "bitsandbytes-nf4", "bitsandbytes-fp4")
LEVELS = {"trace": "debug", "warn": "warning"}  # values of LOG_LEVEL that penstock calls otherwise
FALSE = ("n", "no", "f", "false", "off", "0")  # as TGI reads a switch from the environment; anything else is true


@dataclass(frozen=True, slots=True)
class Translation:
    """A TGI command line translated into arguments and environment of `penstock serve`."""

    arguments: list[str]
    environment: dict[str, str]  # variables to set in addition to those that are there
    remarks: list[str]  # for the operator, a line each


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command. Returns the exit code: 2 for errors that the operator can correct."""
    standard_streams.repair()
    given = sys.argv[1:] if arguments is None else list(arguments)
    tell = functools.partial(cli.report_error, program=PROGRAM, wrapped=cli.in_json(given, os.environ))
    return cli.exit_code(lambda: _run(given), tell)


def _run(given: Sequence[str]) -> int:
    if {"-h", "--help"}.intersection(given):
        _parser(everything=True).print_help()
        return 0
    if {"-V", "--version"}.intersection(given):
        print(f"{PROGRAM} of penstock {importlib.metadata.version('penstock')}")
        return 0
    return _serve(translate(given, os.environ), os.environ)


def _serve(translation: Translation, environment: MutableMapping[str, str]) -> int:
    environment.update(translation.environment)
    console = Console(cli.in_json(translation.arguments, environment))
    for remark in translation.remarks:
        console.info(remark)
    return cli.main(["serve", *translation.arguments])


def translate(arguments: Sequence[str], environment: Mapping[str, str]) -> Translation:
    """Translates TGI's command line and environment into penstock's. Raises UsageError for what is not supported."""
    environment = command_line.stripped(environment)
    aliases = {name: environment[old] for old, name in ALIASES.items() if environment.get(old) and not environment.get(name)}
    named = {**environment, **aliases}
    values, rest = _parser().parse_known_args(arguments)
    remarks = list(_remarks(values, named))
    environment = {**aliases, **_switches(named)}
    rest += _hostname(values, remarks)
    rest += _memory(values, named)
    rest += ["--cors-allow-origin", values.cors_allow_origin] if values.cors_allow_origin else []
    rest += _collector(values, named, remarks)
    rest += _quantize(values, named, remarks)
    rest += _log_level(rest, named)
    rest += _policies(rest, named)
    rest += _ranks(rest, named)
    environment |= {"PREFIX_CACHING": "", "CUDA_MEMORY_FRACTION": ""}  # turned into flags above
    return Translation(rest, environment, remarks)


def _remarks(values: argparse.Namespace, environment: Mapping[str, str]) -> "list[str]":
    """A line for each flag or variable without effect. Raises UsageError for the first that is refused."""
    remarks: dict[str, None] = {}
    for name in (*IGNORED, *REFUSED):
        text, source = getattr(values, name), flag(name)
        if text is None:
            text, source = environment.get(name.upper()), name.upper()
        if not text or (name in SWITCHES and text.lower() in FALSE) or text in NEUTRAL.get(name, ()):
            continue
        if name in REFUSED:
            shown = source if name in SWITCHES else f"{source}={text}"
            raise UsageError(f"{shown} is text-generation-inference's, and penstock lacks it: {REFUSED[name]}")
        remarks[f"{source} has no effect: {IGNORED[name]}"] = None
    for name, reason in VARIABLES.items():
        if environment.get(name):
            remarks[f"{name} has no effect: {reason}"] = None
    return list(remarks)


def _switches(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables of penstock's switches, with values written as true and false."""
    names = [name.upper() for name, field in options.FIELDS.items() if field.metadata["switch"] and field.metadata["environment"]]
    return {name: str(environment[name].lower() not in FALSE).lower() for name in names if environment.get(name)}


def _hostname(values: argparse.Namespace, remarks: list[str]) -> list[str]:
    """--hostname: TGI listens on all addresses when it is given a name."""
    if values.hostname is None:
        return []
    try:
        return ["--hostname", option_types.address(values.hostname)]
    except ValueError:
        remarks.append(f"--hostname {values.hostname} is no IP address: listening on 0.0.0.0")
        return ["--hostname", "0.0.0.0"]


def _memory(values: argparse.Namespace, environment: Mapping[str, str]) -> list[str]:
    """--cuda-memory-fraction, less the share that TGI leaves unused."""
    given = values.cuda_memory_fraction or environment.get("CUDA_MEMORY_FRACTION")
    room = environment.get("TGI_WIGGLE_ROOM")
    if not given and not room:
        return []
    try:
        return [
            "--cuda-memory-fraction",
            f"{option_types.fraction(given or '1') * option_types.fraction(room or str(WIGGLE_ROOM)):g}",
        ]
    except ValueError as error:
        raise UsageError(f"--cuda-memory-fraction {given or 1} and TGI_WIGGLE_ROOM {room or WIGGLE_ROOM}: {error}") from None


def _collector(values: argparse.Namespace, environment: Mapping[str, str], remarks: list[str]) -> list[str]:
    """--otlp-endpoint: TGI speaks gRPC, which collectors accept at port 4317; they accept HTTP at 4318."""
    source = "--otlp-endpoint" if values.otlp_endpoint else "OTLP_ENDPOINT"
    given = values.otlp_endpoint or environment.get("OTLP_ENDPOINT", "")
    if not given:
        return []
    endpoint = re.sub(r":4317/?$", ":4318", given if "://" in given else f"http://{given}")
    try:
        option_types.url(endpoint)
    except ValueError as error:
        raise UsageError(f"{source}={given}: {error}") from None
    if endpoint != given:
        remarks.append(f"traces go over OTLP/HTTP: to {endpoint} instead of {given}")
    return ["--otlp-endpoint", endpoint]


def _quantize(values: argparse.Namespace, environment: Mapping[str, str], remarks: list[str]) -> list[str]:
    """--quantize: names of libraries that quantize weights at load time become penstock's methods."""
    source = "--quantize" if values.quantize else "QUANTIZE"
    given = values.quantize or environment.get("QUANTIZE", "")
    if given in LACKING:
        raise UsageError(
            f"{source}={given} is text-generation-inference's, and penstock lacks it: leave it out if the checkpoint is quantized "
            "already, by gptq, awq, compressed-tensors or fp8, or take int4, int8 or fp8"
        )
    if given not in METHODS:
        return ["--quantize", given] if given else []
    remarks.append(f"{source}={given} rounds weights as penstock's {METHODS[given]} does")
    return ["--quantize", METHODS[given]]


def _log_level(rest: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """LOG_LEVEL, which may also set levels of modules: "info,text_generation_router=debug"."""
    named = [part.strip().lower() for part in environment.get("LOG_LEVEL", "").split(",") if "=" not in part]
    found = [LEVELS.get(level, level) for level in named]
    if not found or found[0] not in options.FIELDS["log_level"].metadata["choices"] or _given("log_level", rest, {}):
        return []
    return ["--log-level", found[0]]


def _policies(rest: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """PREFIX_CACHING and PREFILL_CHUNKING, which in TGI are variables only."""
    found = []
    caching = environment.get("PREFIX_CACHING", "")
    if caching and not _given("prefix_caching", rest, {}):
        found += ["--prefix-caching", "off" if caching.lower() in FALSE else "on"]
    chunking = environment.get("PREFILL_CHUNKING", "")
    if chunking.lower() in FALSE and not _given("prefill_policy", rest, environment):
        found += ["--prefill-policy", "pause"]
    return found


def _ranks(rest: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """All GPUs that the environment shows, if no number of ranks is given."""
    if any(_given(name, rest, environment) for name in ("num_shard", "sharded", "device")):
        return []
    shown = any(environment.get(name) for name in SHOWING)
    return ["--sharded", "true"] if shown and len(machine.inspect().gpus.memory) > 1 else []


def _given(name: str, arguments: Sequence[str], environment: Mapping[str, str]) -> bool:
    return bool(environment.get(name.upper())) or any(text.partition("=")[0] == flag(name) for text in arguments)


def _parser(everything: bool = False) -> argparse.ArgumentParser:
    """The parser of the flags that are not passed on unchanged; for the help, of all flags."""
    parser = command_line.Parser(
        prog=PROGRAM,
        usage=f"{PROGRAM} [FLAG ...]",
        description="Serves a model as `penstock serve` does, told with text-generation-inference's flags and variables.",
        epilog=cli.ENVIRONMENT,
        formatter_class=command_line.Formatter,
        add_help=everything,
        allow_abbrev=False,
    )
    if everything:
        command_line.add(parser)
        ignored = parser.add_argument_group("text-generation-inference's, accepted without effect")
        refused = parser.add_argument_group("text-generation-inference's, refused")
    else:
        ignored = refused = parser.add_argument_group()
        parser.add_argument("--hostname")
        parser.add_argument("--cuda-memory-fraction")
        parser.add_argument("--otlp-endpoint")
        parser.add_argument("--quantize")
        parser.add_argument("--cors-allow-origin", action=command_line.Joined, const=",")
    for name, why in (IGNORED | REFUSED).items():
        group = refused if name in REFUSED else ignored
        if name in SWITCHES:
            group.add_argument(flag(name), dest=name, action="store_const", const="true", help=why)
        else:
            group.add_argument(flag(name), dest=name, metavar="VALUE", help=why)
    return parser


if __name__ == "__main__":
    sys.exit(main())

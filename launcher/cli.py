"""The `penstock` command: options -> model folder -> plan -> the two configs -> a running server.

Imports nothing heavy, so that `--help` answers at once and the children are started within a blink.
"""

import argparse
import dataclasses
import errno
import functools
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from ..proto import settings
from ..proto.speculation import LOSSY, NOTHING, Speculation, written
from ..router.config import RouterConfig
from ..shard.config import ShardConfig
from ..shard.models.families import shape
from . import (
    adapters,
    assembly,
    checkpoint,
    cluster,
    command_line,
    drafts,
    greeting,
    hub,
    kinds,
    machine,
    nodes,
    options,
    plan,
    replicas,
    rundir,
    streams,
)
from .adapters import Adapter
from .console import Console
from .mistake import Mistake
from .options import Options
from .plan import Plan
from .replicas import Place
from .serve import Command, Part, Server

ENVIRONMENT = (
    "Flags can also be set by environment variables of the same name in upper case, such as MAX_TOTAL_TOKENS=4096; the flag wins."
)
EXCEPTIONS = (
    " Switches take true or false there, and an empty variable counts as unset. Not read are CLUSTER, ENV and LOG_LEVEL, and "
    "NODE_RANK of a single node."
)
COMMANDS = ("serve", "plan", "chat", "bench", "top", "simulate")
SECRETS = ("API_KEY", "ADMIN_KEY", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_API_TOKEN")  # no child needs them
NO_THREAD = "can't start new thread"  # as Python words it
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command. Returns the exit code: 2 for what the operator can mend."""
    streams.complete()
    try:
        return _run(sys.argv[1:] if arguments is None else list(arguments), os.environ)
    except Mistake as mistake:
        return _complain(str(mistake), 2)
    except KeyboardInterrupt:
        return 130  # before anything was started, during a download for instance
    except BrokenPipeError:
        # `penstock plan | head`. Python would complain once more when it flushes at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        if error.errno in FULL and error.filename is None:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # likewise
            text = f"stdout can't be written to ({error.strerror}): free space there"
        else:  # a name that is too long, a folder without rights, no more processes... The system's words say what would do
            text = f"{error.filename}: {error.strerror}" if error.filename is not None else str(error)
        return _complain(text, 1)
    except RuntimeError as error:
        if str(error) != NO_THREAD:
            raise
        more = "more memory or processes have to be allowed (ulimit -u, ulimit -v, TasksMax=, --pids-limit)"
        return _complain(f"{error}: {more}", 1)


def _complain(text: str, code: int) -> int:
    """In one line, whatever characters the names in it have. Returns the exit code."""
    shown = "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)
    print(f"penstock: error: {shown}", file=sys.stderr)
    return code


def _run(arguments: list[str], environment: Mapping[str, str]) -> int:
    if arguments[:1] == ["simulate"]:
        os.execv(sys.executable, [sys.executable, "-P", "-m", "penstock.simulator", *arguments[1:]])
    if arguments[:1] in (["chat"], ["bench"], ["top"]):
        return _client(arguments[0], arguments[1:], environment)
    commands: dict[str, Callable[[Options, Mapping[str, str]], int]] = {"serve": _serve, "plan": _plan}
    top, parsers = _parsers()
    if not arguments:
        top.print_help()
        return 0
    if arguments[0] not in commands:
        top.parse_known_args(arguments[:1])  # --help and --version end here
        raise Mistake(_no_command(arguments[0].partition("=")[0]))
    asked = command_line.parse(parsers[arguments[0]], arguments[1:], environment)
    if asked.env:
        Console(asked.json_output).say(greeting.describe())
    return commands[arguments[0]](asked, environment)


def _no_command(name: str) -> str:
    """A complaint about what stands where a command is needed: a flag, what looks like a model, or a word."""
    if name.startswith("-"):
        return f"no flag {name}{command_line.meant(name, ['--version', '--help'], 'penstock')}"
    if "/" in name or "." in name or Path(name).is_dir():
        return f"{name} is no command: did you mean penstock serve {name}?"
    return f"{name} is no command{command_line.meant(name, COMMANDS, 'penstock')}"


def _client(name: str, arguments: list[str], environment: Mapping[str, str]) -> int:
    """Those that ask a server, ours or another."""
    key = functools.partial(_key, environment)
    # Imported here, since they bring rich, aiohttp and numpy, for which nobody else shall wait.
    if name == "bench":
        from ..bench import command

        return command.main(arguments, key)
    from . import chat, top

    if name == "top":
        return top.main(arguments, key)
    return chat.main(arguments, key)


def _key(environment: Mapping[str, str], given: str) -> str:
    """What a client shows a server: what the flag gives, or else the environment; "" for none. Raises Mistake."""
    several = kinds.keys_of(environment.get("API_KEY", ""))[:1]  # of a server that has several any will do
    other = environment.get("OPENAI_API_KEY", "")
    for source, text in (("--api-key", given), *(("API_KEY", one) for one in several), ("OPENAI_API_KEY", other)):
        try:
            if found := kinds.key(text.strip()):
                return found
        except ValueError as error:
            raise Mistake(f"{source}: {error}") from None
    return ""


def _parsers() -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    top = command_line.Parser(
        prog="penstock",
        description="A server for large language models, with the HTTP APIs of text-generation-inference and OpenAI.",
        epilog="penstock serve               serves the small model that comes with it\n"
        "penstock serve FOLDER|ID     serves a model of a folder, or of the Hugging Face hub\n"
        "penstock plan FOLDER|ID      shows how it would run: ranks, memory, capacity\n"
        "penstock chat [URL]          talks to a server that runs, ours or any with OpenAI's API\n"
        "penstock bench [URL]         loads a server, and says what its clients get\n"
        "penstock top [URL ...]       watches servers\n"
        "penstock simulate --help     plays traffic against the scheduler alone, thousands of requests a second\n"
        "penstock serve --help        lists every flag",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage=f"penstock [-h] [--version] {{{','.join(COMMANDS)}}} [MODEL] [FLAG ...]",
        allow_abbrev=False,
    )
    command_line.add_version(top)
    described = {
        "serve": "Starts shards and router, and serves MODEL until Ctrl-C.",
        "plan": "Shows how MODEL would run with these flags, here or (--cluster) on other machines. Starts nothing.",
    }
    parsers: dict[str, argparse.ArgumentParser] = {}
    for name, description in described.items():
        parser = command_line.Parser(
            prog=f"penstock {name}",
            usage=f"penstock {name} [MODEL] [FLAG ...]",
            description=description,
            epilog=ENVIRONMENT + EXCEPTIONS,
            formatter_class=command_line.Formatter,
            allow_abbrev=False,
        )
        command_line.add(parser)
        parsers[name] = parser
    return top, parsers


def _plan(asked: Options, environment: Mapping[str, str]) -> int:
    name, folder = _locate(asked, weights=False)
    ask = functools.partial(hub.remote, asked.model_id, asked.revision) if hub.on_hub(asked.model_id) else None
    model = checkpoint.read(folder, asked.load_format, ask)
    _, draft = drafts.resolve(asked, model, weights=False)
    changes = adapters.resolve(asked, name, weights=False)
    if asked.cluster:
        print(cluster.table(asked, model, name, cluster.parse(asked.cluster), draft, changes))
    else:
        print(plan.table(plan.make(asked, model, draft, changes), name))
    return 0


def _serve(asked: Options, environment: Mapping[str, str]) -> int:
    began = time.monotonic()
    if asked.cluster:
        raise Mistake(f"--cluster {asked.cluster} is for penstock plan: serve runs on this machine")
    machine.take_files()
    os.umask(os.umask(0o077) & 0o077)  # takes rights from others only: what we write, our own processes read
    console = Console(asked.json_output)
    asked, node = nodes.settle(asked, environment)
    if node:
        console.say(node)
    assembly.checked(asked, asked.master_addr if node else asked.shard_listen.rpartition(":")[0])
    if not asked.node_rank and not asked.no_router:
        machine.check_port(asked.hostname, asked.port)
    name, folder = _locate(asked, weights=asked.local_replicas > 0 and asked.load_format != "dummy")
    if not asked.local_replicas:
        return _route(asked, name, folder, environment, console, began)
    model = checkpoint.read(folder, asked.load_format)
    speculation, draft = drafts.resolve(asked, model, weights=asked.load_format != "dummy")
    changes = adapters.resolve(asked, name)
    planned = plan.make(asked, model, draft, changes)
    text = text_folder(planned)
    _tell(asked, name, planned, text, speculation, console)
    if not asked.node_rank and not asked.no_router:
        greeting.warn(asked, environment, console)
    with ExitStack() as stack:
        private = stack.enter_context(rundir.private())
        prefix = asked.shard_uds_path or str(private / "shard")
        names = replicas.sockets(asked.local_replicas, planned.local_ranks)
        paths = stack.enter_context(rundir.prefixed(prefix, [each for one in names for each in one]))
        places = replicas.divide(asked, planned.local_ranks, planned.device == "cuda", paths, environment, planned.amd)
        for host, port in replicas.listening(places):
            machine.check_port(host, port, "--shard-listen", "--shard-listen")
        configs = [
            shard_configs(asked, name, planned, place.sockets, place.relay, place.meeting, speculation, place.listen, changes)
            for place in places
        ]
        interpreted = planned.device == "cpu" and asked.penstock_kernels == "triton"
        local = asked.nnodes == 1 and sys.platform.startswith("linux")
        shown = places[0].environment if places[0].alone else {}
        children = child_environment({**environment, **shown}, planned.threads, interpret=interpreted, local=local)
        if asked.nnodes > 1:
            digest = checkpoint.digest(model) + (checkpoint.digest(draft) if draft else "")
            digest += "".join(change.digest for change in changes)
            ours = assembly.Ours(asked, configs[0], digest, private, children, _command, console)
            if asked.node_rank:
                return assembly.follow(ours)
            spread, found = assembly.lead(ours)
            groups: dict[str, Part] = {"0": spread}
            addresses: Sequence[Sequence[str]] = [found]
        else:
            groups = {place.name: _part(asked, place, shards) for place, shards in zip(places, configs, strict=True)}
            addresses = [place.addresses for place in places]
        return _server(asked, name, text, private, groups, addresses, children, console, began).run()


def _tell(asked: Options, name: str, planned: Plan, text: Path, speculation: Speculation, console: Console) -> None:
    """What will run, and what the operator may not expect of it. text: where the tokenizer is."""
    of = f"{asked.local_replicas} replicas of {planned.ranks}" if asked.local_replicas > 1 else planned.ranks
    console.say(f"{name} on {planned.device}, {planned.dtype}, ranks: {of}, threads of each: {planned.threads}")
    if planned.unused:
        console.say(f"a GPU is here that is not used: {planned.unused}")
    folder = planned.checkpoint.folder
    if text != folder:
        console.say(f"{folder} has no tokenizer.json: the embedded demo model's tokenizer stands in")
    if speculation.most and speculation.verify in LOSSY:
        console.say(f"--speculate verify={speculation.verify} is lossy: answers differ from what the model says without guesses")
    idle = [options.flag(option) for option in options.PAUSING if getattr(asked, option) is not None]
    if idle and asked.prefill_policy != "pause":
        console.say(f"no effect without --prefill-policy pause: {', '.join(idle)}")


def _route(asked: Options, name: str, folder: Path, environment: Mapping[str, str], console: Console, began: float) -> int:
    """Serves with rank groups that somebody else has started."""
    if not checkpoint.has_tokenizer(folder):
        raise Mistake(f"{folder} has no tokenizer.json, which the router needs: name the folder of the model that --replica serves")
    greeting.warn(asked, environment, console)
    if idle := [options.flag(name) for name in options.SHARDS if getattr(asked, name) != options.FIELDS[name].default]:
        console.say(f"no effect on shards that somebody else starts: {', '.join(idle)}")
    with rundir.private() as private:
        children = child_environment(environment, 1)
        return _server(asked, name, folder, private, {}, [], children, console, began).run()


def _server(
    asked: Options,
    name: str,
    text: Path,
    private: Path,
    groups: Mapping[str, Part],
    addresses: Sequence[Sequence[str]],
    environment: Mapping[str, str],
    console: Console,
    began: float,
) -> Server:
    """These rank groups, with their addresses, and a router in front of them, if one is wanted."""
    complaints = private / "complaints"
    file = private / "router.json"
    with rundir.writing(str(private)):
        os.mkfifo(complaints)
        # The router's settings may hold the API key, which `ps` would show.
        file.write_text(settings.dump(router_config(asked, name, text, [*addresses, *asked.remote_replicas], str(complaints))))

    def ready() -> None:
        seconds = time.monotonic() - began
        console.say(greeting.shards(addresses) if asked.no_router else greeting.banner(asked, name, text, seconds))

    return Server(
        router=None if asked.no_router else Command("router", _command("penstock.router", f"@{file}")),
        groups=groups,
        environment=environment,
        console=console,
        health=(greeting.reachable(asked.hostname), asked.port),
        ready=ready,
        grace=asked.graceful_termination_timeout,
        max_restarts=asked.max_restarts,
        complaints=complaints,
    )


def _part(asked: Options, place: Place, shards: Sequence[ShardConfig]) -> Part:
    """A rank group of this machine alone."""
    named = [dataclasses.replace(shard, name=place.process(shard.rank)) for shard in shards]
    commands = [Command(shard.name, _command("penstock.shard", settings.dump(shard)), place.environment) for shard in named]
    return Part(place.title, commands, asked.max_restarts, place.files)


def _locate(asked: Options, weights: bool) -> tuple[str, Path]:
    return hub.locate(asked.model_id, asked.revision, asked.huggingface_hub_cache, not asked.json_output, weights)


def text_folder(planned: Plan) -> Path:
    """Where the router finds tokenizer and chat template: with random weights, the demo model's do. Raises Mistake."""
    folder = planned.checkpoint.folder
    if checkpoint.has_tokenizer(folder):
        return folder
    _, demo = hub.locate("")
    needed, there = shape(checkpoint.read(demo, "dummy").config).vocabulary, planned.shape.vocabulary
    if there < needed:
        raise Mistake(
            f"{folder} has no tokenizer.json, and its vocab_size {there} is below the {needed} tokens of the embedded tokenizer "
            "that would stand in: raise it, or put a tokenizer.json there"
        )
    return demo


def _command(module: str, configuration: str) -> list[str]:
    # -P: modules come from where penstock is installed, never from the folder that the operator happens to be in.
    return [sys.executable, "-P", "-m", module, configuration]


def router_config(asked: Options, name: str, folder: Path, groups: Sequence[Sequence[str]], complaints: str = "") -> RouterConfig:
    """Options and settings that bear the same name are the same. groups: the addresses of each one's ranks."""
    addresses = tuple(tuple(ranks) for ranks in groups)
    fields = {field.name for field in dataclasses.fields(RouterConfig)} & set(options.FIELDS)
    given = {field: value for field in fields if (value := getattr(asked, field)) is not None}
    given["speculate"] = asked.speculation.most
    given["adapters"] = tuple(adapters.parse(asked.lora_adapters, name))
    keys = kinds.keys_of(asked.api_key)
    return RouterConfig(folder=str(folder), model=name, groups=addresses, complaints=complaints, api_keys=keys, **given)


def shard_configs(
    asked: Options,
    name: str,
    planned: Plan,
    sockets: Sequence[str],
    relay: str,
    meeting: str,
    speculation: Speculation = NOTHING,
    listen: Sequence[str] = (),
    changes: Sequence[Adapter] = (),
) -> list[ShardConfig]:
    """One per rank of a group on this machine. listen: where ranks are reached instead of their sockets."""
    first = (asked.node_rank or 0) * planned.local_ranks
    return [
        ShardConfig(
            folder=str(planned.checkpoint.folder),
            model=name,
            rank=rank,
            ranks=planned.ranks,
            local_rank=rank - first,
            local_ranks=planned.local_ranks,
            device=planned.device,
            dtype=planned.dtype,
            quantize=asked.quantize,
            adapters=adapters.names(changes),
            kv_cache_dtype=asked.kv_cache_dtype,
            kernels=asked.penstock_kernels,
            cuda_graphs=asked.cuda_graphs,
            overlap=asked.overlap,
            batch_invariant=asked.batch_invariant,
            load_format=asked.load_format,
            page_size=asked.page_size,
            longest=asked.max_total_tokens if planned.shape.rope.kind == "longrope" else 0,  # what nobody goes by may differ
            kv_pages=asked.pool_pages,
            prefix_caching=asked.prefix_caching == "on",
            speculate=written(speculation),
            # Groups on a CPU share its memory, ranks of a group divide their part of it themselves.
            memory_fraction=asked.cuda_memory_fraction / (asked.local_replicas if planned.device == "cpu" else 1),
            threads=planned.threads,
            socket="" if listen else sockets[rank - first],
            listen=listen[rank - first] if listen else "",
            tls_cert=asked.tls_cert if listen else "",
            tls_key=asked.tls_key if listen else "",
            tls_ca=asked.tls_ca if listen else "",
            relay=relay if planned.local_ranks > 1 else "",
            meeting=meeting if 1 < planned.ranks == planned.local_ranks else "",
            json_output=asked.json_output,
        )
        for rank in range(first, first + planned.local_ranks)
    ]


def child_environment(environment: Mapping[str, str], threads: int, interpret: bool = False, local: bool = False) -> dict[str, str]:
    """Ours, without secrets, and with what libraries read before any code of ours runs. interpret: kernels, by Triton on a CPU;
    local: ranks talk to each other within this machine only, where else Gloo would listen at the address of its name."""
    libraries = {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "OPENBLAS_NUM_THREADS": threads}
    return {
        **{name: value for name, value in environment.items() if name not in SECRETS},
        **{name: str(value) for name, value in libraries.items()},
        # Steps run on a thread of their own, whose arena would give memory back and fault it in again (7 % of a prefill).
        "MALLOC_ARENA_MAX": "1",
        # Threads that wait by spinning take a busy machine's cores from those that they wait for: a thirtieth of the speed.
        "OMP_WAIT_POLICY": environment.get("OMP_WAIT_POLICY", "PASSIVE"),
        # A message comes over one thread instead of four that wake each other: of a step half of gRPC's CPU, in router and shard.
        "GRPC_EXPERIMENTS": environment.get("GRPC_EXPERIMENTS", "-event_engine_client,-event_engine_listener"),
        "PYTHONUNBUFFERED": "1",  # their lines reach us when they are written
        "TOKENIZERS_PARALLELISM": "false",  # one prompt at a time gains nothing from it
        **({"TRITON_INTERPRET": "1"} if interpret else {}),
        **({"GLOO_SOCKET_IFNAME": environment.get("GLOO_SOCKET_IFNAME", "lo")} if local else {}),
    }

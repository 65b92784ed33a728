"""`penstock serve`: options -> model folder -> plan -> settings -> supervised router and shards."""

import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from ..proto import settings
from ..proto.speculation import LOSSY, Speculation, written
from ..router.config import ADDRESS, RouterConfig
from ..shard.config import ShardConfig
from ..shard.models.families import shape
from . import (
    adapters,
    banner,
    checkpoint,
    children,
    drafts,
    hub,
    machine,
    multi_node,
    nodes,
    options,
    plan,
    replicas,
    rundir,
    vision,
)
from .console import Console
from .errors import UsageError
from .options import Options
from .parts import Command, Part
from .plan import Plan
from .replicas import Place
from .supervisor import Supervisor


def run(asked: Options, environment: Mapping[str, str]) -> int:
    """Runs a server until it ends, and returns the exit code. Raises UsageError for what cannot work, before anything starts."""
    began = time.monotonic()
    if asked.cluster:
        raise UsageError(f"--cluster {asked.cluster} is for penstock plan: serve runs on this machine")
    if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:  # which the first process of a container would not get at all
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # until the supervisor has a handler
    machine.take_files()
    os.umask(os.umask(0o077) & 0o077)  # takes rights from others only: what the server writes, its own processes read
    console = Console(asked.json_output)
    asked, node = nodes.settle(asked, environment)
    if node:
        console.info(node)
    multi_node.checked(asked, asked.master_addr if node else asked.shard_listen.rpartition(":")[0])
    if not asked.node_rank and not asked.no_router:
        machine.check_port(asked.hostname, asked.port)
    weights = asked.local_replicas > 0 and asked.load_format != "dummy"
    name, folder = hub.locate(asked.model_id, asked.revision, asked.huggingface_hub_cache, not asked.json_output, weights)
    meant, folder = drafts.with_base_model(asked, folder, weights)
    if meant is not asked:
        console.info(f"{name} only drafts for {meant.model_id}, which is served with --speculate {meant.speculate}")
    asked = meant
    if not asked.local_replicas:
        return _route(asked, name, folder, environment, console, began)
    model = checkpoint.read(folder, asked.load_format)
    speculation, draft = drafts.resolve(asked, model, weights)
    asked = replace(asked, speculate=written(replace(speculation, draft=asked.speculation.draft)))  # now with the draft's shape
    loras = adapters.resolve(asked, name)
    planned = plan.make(asked, model, draft, loras)
    text = text_folder(planned)
    _tell(asked, name, planned, text, speculation, console)
    if not asked.node_rank and not asked.no_router:
        banner.warn(asked, environment, console)
    with rundir.private() as private, _places(asked, planned, private, environment) as places:
        shards = [children.shard_configs(asked, name, planned, place, speculation, loras) for place in places]
        interpreted = planned.device == "cpu" and asked.penstock_kernels == "triton"
        local = asked.nnodes == 1 and sys.platform.startswith("linux")
        shown = places[0].environment if places[0].alone else {}
        given = children.environment({**environment, **shown}, planned.threads, interpret=interpreted, local=local)
        beside = children.hub_tokens(asked, environment)
        if asked.nnodes > 1:
            digest = checkpoint.digest(model) + (checkpoint.digest(draft) if draft else "")
            digest += "".join(lora.digest for lora in loras)
            own = multi_node.Node(asked, shards[0], digest, private, given, console, beside)
            if asked.node_rank:
                return multi_node.follow(own)
            part, found = multi_node.lead(own)
            groups: dict[str, Part] = {"0": part}
            addresses: Sequence[Sequence[str]] = [found]
        else:
            groups = {place.name: _part(asked, place, ranks, beside) for place, ranks in zip(places, shards, strict=True)}
            addresses = [place.addresses for place in places]
        images = planned.vision.images if text == model.folder else 0
        config = children.router_config(asked, name, text, addresses, images)
        return _supervisor(asked, config, private, groups, given, console, began).run()


def _tell(asked: Options, name: str, planned: Plan, text: Path, speculation: Speculation, console: Console) -> None:
    """Logs what will run, and what the operator may not expect of it. text: the folder of the tokenizer."""
    of = f"{asked.local_replicas} replicas of {planned.ranks}" if asked.local_replicas > 1 else planned.ranks
    console.info(f"{name} on {planned.device}, {planned.dtype}, ranks: {of}, threads of each: {planned.threads}")
    if planned.unused:
        console.info(f"a GPU is here that is not used: {planned.unused}")
    folder = planned.checkpoint.folder
    if text != folder:
        console.info(f"{folder} has no tokenizer.json: the embedded demo model's tokenizer stands in")
    if planned.vision.why:
        console.info(f"text alone is served: {planned.vision.why}")
    if speculation.most and speculation.verify in LOSSY:
        console.info(f"--speculate verify={speculation.verify} is lossy: answers differ from those without speculation")
    idle = [options.flag(option) for option in options.PAUSING if getattr(asked, option) is not None]
    if idle and asked.prefill_policy != "pause":
        console.info(f"no effect without --prefill-policy pause: {', '.join(idle)}")


def _route(asked: Options, name: str, folder: Path, environment: Mapping[str, str], console: Console, began: float) -> int:
    """Serves with a router alone, in front of rank groups that somebody else has started."""
    if not checkpoint.has_tokenizer(folder):
        raise UsageError(
            f"{folder} has no tokenizer.json, which the router needs: name the folder of the model that --replica serves"
        )
    banner.warn(asked, environment, console)
    if idle := [options.flag(name) for name in options.SHARDS if getattr(asked, name) != options.FIELDS[name].default]:
        console.info(f"no effect on shards that somebody else starts: {', '.join(idle)}")
    config = children.router_config(asked, name, folder, (), vision.of(asked, folder))
    with rundir.private() as private:
        return _supervisor(asked, config, private, {}, children.environment(environment, 1), console, began).run()


@contextmanager
def _places(asked: Options, planned: Plan, private: Path, environment: Mapping[str, str]) -> Iterator[list[Place]]:
    """Where the rank groups of this machine listen: at sockets, which exist within this context, or at ports."""
    prefix = asked.shard_uds_path or str(private / "shard")
    absolute = str(Path(prefix).absolute())
    if asked.no_router and asked.shard_uds_path and not ADDRESS.fullmatch(f"unix:{absolute}"):
        raise UsageError(f"--shard-uds-path: {absolute} has a space, comma or semicolon, with which --replica can't name it")
    places = replicas.divide(asked, planned.local_ranks, absolute, environment, planned.gpus)
    with rundir.prefixed(prefix, [path for place in places for path in place.files]):
        for host, port in replicas.listening(places):
            machine.check_port(host, port, "--shard-listen", "--shard-listen")
        yield places


def _part(asked: Options, place: Place, shards: Sequence[ShardConfig], beside: Mapping[str, str]) -> Part:
    """The part of a rank group on this machine alone. beside: environment variables for its shards only."""
    own = {**place.environment, **beside}
    commands = [Command(shard.name, children.command("penstock.shard", settings.dump(shard)), own) for shard in shards]
    return Part(place.title, commands, asked.max_restarts, place.files)


def _supervisor(
    asked: Options,
    config: RouterConfig,
    private: Path,
    groups: Mapping[str, Part],
    environment: Mapping[str, str],
    console: Console,
    began: float,
) -> Supervisor:
    """The supervisor of these rank groups, and of a router with these settings in front of them unless --no-router is given."""
    hang_reports = private / "hang_reports"
    file = private / "router.json"
    with rundir.writing(str(private)):
        os.mkfifo(hang_reports)
        # The router's settings may hold the API key, which `ps` would show.
        file.write_text(settings.dump(replace(config, hang_reports=str(hang_reports))))

    def ready() -> None:
        if asked.no_router:
            console.info(banner.shards(config.groups))
        else:
            console.info(banner.banner(asked, config.model, Path(config.folder), time.monotonic() - began))

    router = Part("the router", [Command("router", children.command("penstock.router", f"@{file}"))], asked.max_restarts)
    return Supervisor(
        router=None if asked.no_router else router,
        groups=groups,
        environment=environment,
        console=console,
        health=(banner.reachable(asked.hostname), asked.port),
        ready=ready,
        grace=asked.graceful_termination_timeout,
        hang_reports=hang_reports,
    )


def text_folder(planned: Plan) -> Path:
    """The folder of tokenizer and chat template for the router: with random weights, the demo model's. Raises UsageError."""
    folder = planned.checkpoint.folder
    if checkpoint.has_tokenizer(folder):
        return folder
    _, demo = hub.locate("")
    needed, there = shape(checkpoint.read(demo, "dummy").config).vocabulary, planned.shape.vocabulary
    if there < needed:
        raise UsageError(
            f"{folder} has no tokenizer.json, and its vocab_size {there} is below the {needed} tokens of the embedded tokenizer "
            "that would stand in: raise it, or put a tokenizer.json there"
        )
    return demo

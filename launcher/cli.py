"""The `penstock` command: dispatches to its subcommands, and turns errors into a line and an exit code.

Imports nothing heavy, so that `--help` answers at once and the children are started quickly.
"""

import argparse
import errno
import functools
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from . import adapters, banner, checkpoint, cluster, command_line, drafts, hub, option_types, plan, serve, standard_streams
from .console import Console
from .errors import UsageError
from .options import Options

ENVIRONMENT = (
    "Flags can also be set by environment variables of the same name in upper case, such as MAX_TOTAL_TOKENS=4096; the flag wins."
)
EXCEPTIONS = (
    " Switches take true or false there, and an empty variable counts as unset. Not read are CLUSTER, ENV and LOG_LEVEL, and "
    "NODE_RANK of a single node."
)
COMMANDS = ("serve", "plan", "chat", "bench", "top", "simulate")
NO_THREAD = "can't start new thread"  # as Python words it
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# Of what was named, another name or other rights would do; a supervisor need not try again.
MENDABLE = (errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EROFS)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command. Returns the exit code: 2 for errors that the operator can correct."""
    standard_streams.repair()
    given = sys.argv[1:] if arguments is None else list(arguments)
    tell = functools.partial(report_error, wrapped=given[:1] == ["serve"] and in_json(given, os.environ))
    return exit_code(lambda: _run(given, os.environ), tell)


def exit_code(run: Callable[[], int], tell: Callable[[str, int], int]) -> int:
    """Runs a command. Returns its exit code, or the one of an error that ended it, which `tell` reports and returns."""
    try:
        try:
            return run()
        finally:
            sys.stdout.flush()  # else Python would do so when it ends, with an error of its own
    except UsageError as error:
        return tell(str(error), 2)
    except KeyboardInterrupt:
        return 130  # before anything was started, during a download for instance
    except BrokenPipeError:
        # `penstock plan | head`. Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        if error.errno in FULL and error.filename is None:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # as above
            text = f"stdout can't be written to ({error.strerror}): free space there"
        else:  # a name that is too long, a folder without rights, no more processes... The system's words say what would help
            text = f"{error.filename}: {error.strerror}" if error.filename is not None else str(error)
        return tell(text, 2 if error.filename is not None and error.errno in MENDABLE else 1)
    except RuntimeError as error:
        if str(error) != NO_THREAD:
            raise
        more = "more memory or processes have to be allowed (ulimit -u, ulimit -v, TasksMax=, --pids-limit)"
        return tell(f"{error}: {more}", 1)


def in_json(arguments: Sequence[str], environment: Mapping[str, str]) -> bool:
    """Whether log lines are to be JSON, as far as that can be known while the flags may be wrong."""
    return "--json-output" in arguments or environment.get("JSON_OUTPUT", "").strip().lower() in ("true", "1")


def report_error(text: str, code: int, program: str = "penstock", *, wrapped: bool = False) -> int:
    """Prints an error in one line, whatever characters the names in it have; wrapped: as JSON, like all log lines. Returns the exit
    code."""
    shown = "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)
    if wrapped:
        Console(json_output=True).error(shown)
    else:
        print(f"{program}: error: {shown}", file=sys.stderr)
    return code


def _run(arguments: list[str], environment: Mapping[str, str]) -> int:
    if arguments[:1] == ["simulate"]:
        os.execv(sys.executable, [sys.executable, "-P", "-m", "penstock.simulator", *arguments[1:]])
    if arguments[:1] in (["chat"], ["bench"], ["top"]):
        return _client(arguments[0], arguments[1:], environment)
    commands: dict[str, Callable[[Options, Mapping[str, str]], int]] = {"serve": serve.run, "plan": _plan}
    top, parsers = _parsers()
    if not arguments:
        top.print_help()
        return 0
    if arguments[0] not in commands:
        top.parse_known_args(arguments[:1])  # --help and --version end here
        raise UsageError(_no_command(arguments[0].partition("=")[0]))
    asked = command_line.parse(parsers[arguments[0]], arguments[1:], environment)
    if asked.env:
        Console(asked.json_output).info(banner.describe())
    return commands[arguments[0]](asked, environment)


def _no_command(name: str) -> str:
    """An error message about what stands where a command is needed: a flag, what looks like a model, or a word."""
    if name.startswith("-"):
        return f"no flag {name}{command_line.did_you_mean(name, ['--version', '--help'], 'penstock')}"
    if "/" in name or "." in name or Path(name).is_dir():
        return f"{name} is no command: did you mean penstock serve {name}?"
    return f"{name} is no command{command_line.did_you_mean(name, COMMANDS, 'penstock')}"


def _client(name: str, arguments: list[str], environment: Mapping[str, str]) -> int:
    """Runs the commands that are clients of a server, penstock's or another."""
    key = functools.partial(_key, environment)
    # Imported here, since they bring rich, aiohttp and numpy, for which other commands need not wait.
    if name == "bench":
        from ..bench import command

        return command.main(arguments, key)
    from . import chat, top

    if name == "top":
        return top.main(arguments, key)
    return chat.main(arguments, key)


def _key(environment: Mapping[str, str], given: str) -> str:
    """The API key that a client sends: from the flag, else from the environment; "" for none. Raises UsageError."""
    several = option_types.keys_of(environment.get("API_KEY", ""))[:1]  # any key will do where the server has several
    other = environment.get("OPENAI_API_KEY", "")
    for source, text in (("--api-key", given), *(("API_KEY", one) for one in several), ("OPENAI_API_KEY", other)):
        try:
            if found := option_types.key(text.strip()):
                return found
        except ValueError as error:
            raise UsageError(f"{source}: {error}") from None
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
    name, folder = hub.locate(asked.model_id, asked.revision, asked.huggingface_hub_cache, not asked.json_output, weights=False)
    asked, folder = drafts.with_base_model(asked, folder, weights=False)
    ask = functools.partial(hub.remote, asked.model_id, asked.revision) if hub.on_hub(asked.model_id) else None
    model = checkpoint.read(folder, asked.load_format, ask)
    _, draft = drafts.resolve(asked, model, weights=False)
    loras = adapters.resolve(asked, name, weights=False)
    if asked.cluster:
        print(cluster.table(asked, model, name, cluster.parse(asked.cluster), draft, loras))
    else:
        print(plan.table(plan.make(asked, model, draft, loras), name))
    return 0

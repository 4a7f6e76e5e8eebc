"""`run`: it replaces itself by a command, whose processes use the layer in models of transformers or Megatron-Core.

`interop/startup` says how: Python runs a file from a folder of PYTHONPATH when it starts.
"""

import argparse
import os
import signal
import sys

from moeblaze_cupy import checks
from moeblaze_cupy.interop import startup
from moeblaze_cupy.tools.command import CommandError, one_line


def run(args: argparse.Namespace) -> int:
    """Does not return, as the command takes this process over: its signals and its exit status are the command's."""
    words = args.words[1:] if args.words[:1] == ["--"] else args.words
    if not words or not words[0]:
        raise CommandError("COMMAND: expected a program and its arguments after --, got none")
    room, mode = "transformers", "import" if args.import_only else "default"
    if args.megatron:
        room, mode = "megatron", "megatron"
    for library in ("torch", room):
        try:
            checks.installed(f"moeblaze_cupy.interop.{room}", library)
        except ModuleNotFoundError as error:
            raise CommandError(one_line(error)) from None
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and the command would inherit this
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvpe(words[0], words, environment(mode))
    except OSError as error:
        code = 127 if isinstance(error, FileNotFoundError) else 126
        raise CommandError(f"COMMAND: expected a program, got {words[0]!r}: {error.strerror}", code) from None


def environment(mode: str) -> dict[str, str]:
    """The variables of this process, with the folder in front of PYTHONPATH. mode: see its `sitecustomize.py`."""
    folder = os.path.abspath(startup.__path__[0])
    entries = [folder]
    checkout = os.path.dirname(os.path.dirname(os.path.dirname(folder)))
    if (
        checkout == os.getcwd() and checkout not in sys.path[1:]
    ):  # `python -m` found the package here, scripts would not
        entries.append(checkout)
    if before := os.environ.get("PYTHONPATH"):
        entries += [entry for entry in before.split(os.pathsep) if entry != folder]
    return os.environ | {"PYTHONPATH": os.pathsep.join(entries), "MOEBLAZE_RUN": mode}

"""Constraints for pip: the lower bound of every requirement in setup.cfg, and of the extras named as arguments."""

import configparser
import re
import sys
from pathlib import Path


def lower_bounds(config: configparser.ConfigParser, extras: list[str]) -> list[str]:
    """One "name==version" per requirement. Raises ValueError for a requirement without ">=" or "=="."""
    texts = [config["options"]["install_requires"], *(config["options.extras_require"][extra] for extra in extras)]
    found = []
    for requirement in (line.strip() for text in texts for line in text.splitlines()):
        if not requirement:
            continue
        match = re.match(r"([\w.-]+)(?:\[[\w,]*\])?\s*[>=]=\s*([\w.]+)", requirement)
        if match is None:
            raise ValueError(f"setup.cfg: expected a lower bound, got {requirement!r}")
        found.append(f"{match[1]}=={match[2]}")
    return found


if __name__ == "__main__":
    parser = configparser.ConfigParser()
    parser.read(Path(__file__).resolve().parent.parent / "setup.cfg")
    print("\n".join(lower_bounds(parser, sys.argv[1:])))

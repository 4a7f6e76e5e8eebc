"""Joins records of several runs of one commit into one.

python -m bench.merge bench/records/NAME.json "what is said of the runs" FIRST.json SECOND.json ...
"""

import argparse
import json
from pathlib import Path


def merge(note: str, records: list[dict]) -> dict:
    """Rows of records of one commit and kind of GPU, all of pytest-benchmark or all of bench.fp8, in their order; the
    rest is the first one's, but for the seconds of all runs together.

    Raises ValueError where commit or GPU differ, or a row is there twice.
    """
    kind = "benchmarks" if "benchmarks" in records[0] else "rows"
    rows = [row for record in records for row in record[kind]]
    for what, of in (("commit", lambda r: r["commit_info"]["id"]), ("GPU", lambda r: r["machine_info"]["gpu"])):
        if len(found := {of(record) for record in records}) > 1:
            raise ValueError(f"bench.merge: expected records of one {what}, got {', '.join(sorted(found))}")
    names = [row["fullname"] if kind == "benchmarks" else f"{row['case']}: {row['kernel']}" for row in rows]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"bench.merge: expected each row once, got again {', '.join(twice)}")
    seconds = [record["wall_s"] for record in records if "wall_s" in record]
    return {"note": note, **records[0], kind: rows, **({"wall_s": sum(seconds)} if seconds else {})}


def main(*argv: str) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.merge", description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, metavar="OUT.json", help="the joined record")
    parser.add_argument("note", help="text about the runs, written into it")
    parser.add_argument("records", type=Path, nargs="+", metavar="RECORD.json")
    args = parser.parse_args(argv or None)
    merged = merge(args.note, [json.loads(path.read_text()) for path in args.records])
    args.out.write_text(json.dumps(merged, indent=1) + "\n")


if __name__ == "__main__":
    main()

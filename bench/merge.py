"""Records of several runs as one, where one call does not last for all rows:

python -m bench.merge bench/records/NAME.json "what is said of the runs" FIRST.json SECOND.json ...
"""

import json
import sys
from pathlib import Path


def merge(note: str, records: list[dict]) -> dict:
    """Rows of pytest-benchmark records of one commit and kind of GPU, in their order; the rest is the first one's.

    Raises ValueError where commit or GPU differ, or a row is there twice.
    """
    rows = [row for record in records for row in record["benchmarks"]]
    for what, of in (("commit", lambda r: r["commit_info"]["id"]), ("GPU", lambda r: r["machine_info"]["gpu"])):
        if len(found := {of(record) for record in records}) > 1:
            raise ValueError(f"bench.merge: expected records of one {what}, got {', '.join(sorted(found))}")
    names = [row["fullname"] for row in rows]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"bench.merge: expected each row once, got again {', '.join(twice)}")
    return {"note": note, **records[0], "benchmarks": rows}


def main(out: str, note: str, *paths: str) -> None:
    merged = merge(note, [json.loads(Path(path).read_text()) for path in paths])
    Path(out).write_text(json.dumps(merged, indent=1) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])

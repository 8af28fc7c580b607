"""Downloads a source archive as pip would, but without building its metadata.

    python pip_sdist.py PROJECT VERSION TARGET      # prints {"sha256": ...} of the index

`pip download --no-binary` prepares a source archive's metadata, which runs the project's build;
vLLM's needs torch and a compiler. pip's own finder and session are used instead, so that index,
proxy, certificates and credentials are those of pip's configuration.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def main(project: str, version: str, target: str) -> int:
    from pip._internal.commands import create_command
    from pip._vendor.packaging.version import Version

    command: Any = create_command("download")
    options, _ = command.parse_args(["--no-binary", ":all:", "--quiet", project])
    with command.main_context():
        session = command.get_default_session(options)
        finder = command._build_package_finder(options, session)
        links = [
            candidate.link
            for candidate in finder.find_all_candidates(project)
            if candidate.version == Version(version) and candidate.link.filename.endswith(".tar.gz")
        ]
        if not links:
            print(f"no source archive of {project} {version} is offered", file=sys.stderr)
            return 1
        link = links[0]
        if link.is_file:
            Path(target).write_bytes(Path(link.file_path).read_bytes())
        else:
            with session.get(link.url_without_fragment, stream=True) as response:
                response.raise_for_status()
                with open(target, "wb") as out:
                    out.writelines(response.iter_content(2**20))
        print(json.dumps({"sha256": link.hash if link.hash_name == "sha256" else None}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))

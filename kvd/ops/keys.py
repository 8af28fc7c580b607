"""`kvd keys`: makes, lists and authorises the keys by which daemons know each other."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

from kvd import keys
from kvd.keys import KeysError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Actions of `kvd keys`, and the folder that all of them take."""
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)

    init = _action(actions, "init", "make the folder and this daemon's key pair", _init)
    init.add_argument("--json", action="store_true", help="as one JSON object")

    add = _action(actions, "add", "trust another daemon's key", _add)
    add.add_argument("name", metavar="NAME", help="what to call it")
    add.add_argument("key", metavar="KEY", help="its public key, or a file with it (kvd.pub)")
    add.add_argument(
        "--address",
        action="append",
        default=[],
        metavar="ADDRESS",
        help="host, host:port or network that it is found at; may be given more than once",
    )

    remove = _action(actions, "remove", "trust a key no more", _remove)
    remove.add_argument("name", metavar="NAME", help="what it is called")

    listing = _action(actions, "list", "our public key, and those that are trusted", _list)
    listing.add_argument("--json", action="store_true", help="as one JSON object")


def _action(
    actions: argparse._SubParsersAction[argparse.ArgumentParser], name: str, text: str, run: object
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = actions.add_parser(
        name, help=text, description=text[0].upper() + text[1:] + ".", allow_abbrev=False
    )
    parser.set_defaults(run=run, flags=("--keys", "--json", "--address"))
    parser.add_argument(
        "--keys",
        metavar="FOLDER",
        default=os.environ.get("KVD_KEYS") or keys.default_folder(),
        help="the keys folder (default: KVD_KEYS, else %(default)s)",
    )
    return parser


def _init(args: argparse.Namespace) -> int:
    ring = keys.init(args.keys)
    public = ring.public.decode()
    if args.json:
        print(json.dumps({"folder": args.keys, "public_key": public}))
        return 0
    print(f"made {args.keys}\npublic key: {public}")
    print(f"\nOn each daemon that this one talks to:\n  kvd keys add NAME '{public}'")
    print(f"and start this one with:\n  kvd serve --keys {args.keys}")
    return 0


def _add(args: argparse.Namespace) -> int:
    addresses = tuple(a.strip() for text in args.address for a in text.split(",") if a.strip())
    try:
        keys.check_name(args.name)
        path = Path(args.key)
        if len(args.key) != 40 and not path.exists():
            raise KeysError(
                f"keys add: {args.key!r} is neither a key (40 characters, as `kvd keys init` "
                "prints it) nor a file with one"
            )
        given = len(args.key) != 40 or path.is_file()
        key = keys.read_public(path).public if given else keys.parse_key(args.key)
    except ValueError as e:
        raise KeysError(f"keys add: {e}") from None
    try:
        keys.check_addresses(addresses)
    except ValueError as e:
        raise KeysError(f"keys add: --address {e}") from None
    made = keys.add(args.keys, args.name, key, addresses)
    print(f"{args.name} is trusted: {made}")
    return 0


def _remove(args: argparse.Namespace) -> int:
    keys.remove(args.keys, args.name)
    print(f"{args.name} is not trusted any more")
    return 0


def _list(args: argparse.Namespace) -> int:
    ring = keys.load(args.keys)
    if args.json:
        peers = [
            {"name": k.name, "public_key": k.public.decode(), "addresses": list(k.addresses)}
            for k in ring.peers
        ]
        listing = {"folder": args.keys, "public_key": ring.public.decode(), "peers": peers}
        print(json.dumps(listing))
        return 0
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table

    table = Table("name", "public key", "at", box=SIMPLE, pad_edge=False)
    table.add_row(keys.OWN, ring.public.decode().replace("[", r"\["), "")
    for key in ring.peers:
        shown = key.public.decode().replace("[", r"\[")
        table.add_row(key.name, shown, ", ".join(key.addresses) or "anywhere")
    Console(highlight=False).print(table)
    return 0

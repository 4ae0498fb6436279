"""The command `vllm-fleet`: the planner without a host, and playbooks with a person in front of the screen.

Exit status: 0 when it worked, 2 for bad input, 3 when no layout fits; of `run`, ansible-playbook's.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

from vllm_fleet import catalog, explain, topology, whatif
from vllm_fleet.errors import BadInputError, PlanError
from vllm_fleet.options import ACCELERATORS, OBJECTIVES, PEER_TO_PEER, Options
from vllm_fleet.plan import make_plan

EXIT_BAD_INPUT = 2
EXIT_NO_LAYOUT = 3

# Options of contract 3 as flags: the flag is the option with dashes.
_OPTION_FLAGS = (
    ("vllm_version", {"metavar": "VERSION", "help": "engine version to plan for"}),
    ("accelerator", {"choices": ACCELERATORS, "help": "what the engine computes on"}),
    ("objective", {"choices": OBJECTIVES, "help": "what to favour"}),
    ("expected_concurrency", {"type": int, "metavar": "N", "help": "requests in flight on the host"}),
    ("min_context", {"type": int, "metavar": "TOKENS", "help": "shortest acceptable context"}),
    ("max_num_seqs", {"type": int, "metavar": "N", "help": "requests that run at once in one replica"}),
    ("max_replicas", {"type": int, "metavar": "N", "help": "at most this many replicas"}),
    ("keep_free_gpus", {"type": int, "metavar": "N", "help": "leave this many GPUs unused"}),
    ("exclude_gpus", {"nargs": "+", "metavar": "GPU", "help": "GPUs to leave alone: UUID, bus id or index"}),
    ("bind_address", {"metavar": "ADDRESS", "help": "address that engines listen on"}),
    ("first_port", {"type": int, "metavar": "PORT", "help": "port of the first replica"}),
    ("served_model_name", {"metavar": "NAME", "help": "name that clients ask for"}),
    ("peer_to_peer", {"choices": PEER_TO_PEER, "help": "transfers between GPUs: as measured, or by your word"}),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    arguments = _parser().parse_args(argv)
    try:
        status = int(arguments.run(arguments))
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, `head` say, has what it wanted
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except PlanError as error:
        print(explain.render_error(str(error), error.reasons), file=sys.stderr)
        return EXIT_BAD_INPUT if isinstance(error, BadInputError) else EXIT_NO_LAYOUT
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="vllm-fleet", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    plan = commands.add_parser("plan", help="plan a model on a saved topology", description="Plan a model on a host.")
    plan.add_argument("--model", required=True, metavar="CARD", help="name of a card in models/, or its path")
    _add_host_and_options(plan)
    plan.add_argument("--format", choices=("text", "json", "html"), default="text", help="how to print the plan")
    plan.set_defaults(run=_plan)
    suits = commands.add_parser(
        "compare", help="plan several models on one host, side by side", description="Which model suits a host."
    )
    suits.add_argument("--model", action="append", metavar="CARD", help="a card, several times; all without it")
    _add_host_and_options(suits)
    suits.add_argument("--format", choices=("text", "json"), default="text", help="how to print it")
    suits.set_defaults(run=_compare)
    new = commands.add_parser(
        "card", help="draft a card from a config.json", description="Draft a card; what it could not know is on top."
    )
    new.add_argument(
        "config", metavar="CONFIG_JSON", help="a model's config.json; hf_quant_config.json beside it counts"
    )
    new.add_argument("--id", metavar="OWNER/NAME", help="the model's repository on Hugging Face")
    new.set_defaults(run=_card)
    show = commands.add_parser("topology", help="show a saved topology", description="Show a host's GPUs and links.")
    show.add_argument("topology", metavar="FILE", help="gpu_topology as JSON, or what capture.yml saved")
    show.add_argument("--format", choices=("text", "json", "svg", "html"), default="text", help="how to print it")
    show.add_argument("--name", default="", help="what to call the host in a picture")
    show.set_defaults(run=_topology)
    compared = commands.add_parser(
        "accuracy", help="compare predicted with reported memory", description="Predicted against reported memory."
    )
    compared.add_argument("reports", metavar="CSV", help="columns as in tests/fixtures/memory/memory_reports.csv")
    compared.add_argument("--format", choices=("text", "json"), default="text", help="how to print it")
    compared.set_defaults(run=_accuracy)
    played = commands.add_parser(
        "run",
        help="run a playbook, with a line per event that matters",
        description="Run a playbook and keep its story.",
    )
    played.add_argument("playbook", metavar="PLAYBOOK", help="its path, or its name in playbooks/")
    played.add_argument(
        "arguments", nargs=argparse.REMAINDER, help="what ansible-playbook takes besides: -i, -e, --limit"
    )
    played.set_defaults(run=_run)
    past = commands.add_parser(
        "runs", help="list the runs, or show what one printed", description="The history of runs."
    )
    past.add_argument("id", nargs="?", metavar="RUN", help="one of them")
    past.set_defaults(run=_runs)
    return parser


def _add_host_and_options(command: argparse.ArgumentParser) -> None:
    host = command.add_mutually_exclusive_group(required=True)
    host.add_argument("--topology", metavar="FILE", help="gpu_topology as JSON, or a folder saved by capture.yml")
    host.add_argument("--gpus", metavar="HOST", help="a host that nobody has probed, such as '8x H200'")
    command.add_argument("--models-dir", metavar="FOLDER", help="folder of the cards")
    for name, settings in _OPTION_FLAGS:
        command.add_argument(f"--{name.replace('_', '-')}", **settings)


def _facts(arguments: argparse.Namespace) -> dict[str, Any]:
    return whatif.host(arguments.gpus) if arguments.gpus else topology.read(arguments.topology)


def _options(arguments: argparse.Namespace) -> dict[str, Any]:
    return {name: getattr(arguments, name) for name, _ in _OPTION_FLAGS}


def _plan(arguments: argparse.Namespace) -> int:
    card = catalog.read_card(arguments.model, arguments.models_dir)
    facts = _facts(arguments)
    plan = make_plan(facts, card, _options(arguments)).to_dict()
    if arguments.format == "html":
        from vllm_fleet import page  # noqa: PLC0415  only this format needs it

        print(page.render(plan, topology.Topology.from_dict(facts)))
    else:
        print(json.dumps(plan, indent=2) if arguments.format == "json" else explain.render(plan))
    return 0


def _compare(arguments: argparse.Namespace) -> int:
    from vllm_fleet import compare  # noqa: PLC0415  only this command needs it

    cards = [catalog.read_card(name, arguments.models_dir) for name in arguments.model or []]
    if not arguments.model:
        every = [catalog.read_card(name, arguments.models_dir) for name in catalog.known_cards(arguments.models_dir)]
        cards = [card for card in every if not card.get("lab")]
    facts, options = _facts(arguments), _options(arguments)
    entries = compare.compare(facts, cards, options)
    concurrency = Options.from_dict(options).expected_concurrency
    host = topology.Topology.from_dict(facts)
    print(json.dumps(entries, indent=2) if arguments.format == "json" else compare.render(host, entries, concurrency))
    return 0


def _card(arguments: argparse.Namespace) -> int:
    from vllm_fleet import new_card  # noqa: PLC0415  only this command needs it

    print(new_card.render(*new_card.draft(arguments.config, arguments.id)), end="")
    return 0


def _topology(arguments: argparse.Namespace) -> int:
    from vllm_fleet import draw  # noqa: PLC0415  only this command draws

    facts = topology.read(arguments.topology)
    topology.Topology.from_dict(facts, arguments.topology)  # refuses what cannot be drawn
    printed = {
        "text": lambda: draw.text(facts),
        "json": lambda: json.dumps(facts, indent=2),
        "svg": lambda: draw.svg(facts, arguments.name),
        "html": lambda: draw.html_page(facts, arguments.name),
    }
    print(printed[arguments.format]())
    return 0


def _run(arguments: argparse.Namespace) -> int:
    from vllm_fleet import runner  # noqa: PLC0415  only this command runs anything

    playbook = runner.find_playbook(arguments.playbook)
    if playbook is None:
        known = ", ".join(sorted(path.stem for path in (runner.REPOSITORY / "playbooks").glob("*.yml")))
        raise BadInputError(f"There is no playbook {arguments.playbook}. In playbooks/ are {known}.")
    return runner.run(playbook, arguments.arguments, lambda line: print(line, flush=True))


def _runs(arguments: argparse.Namespace) -> int:
    from vllm_fleet import runner  # noqa: PLC0415  as above

    lines = runner.show(arguments.id) if arguments.id else runner.history()
    if lines is None:
        raise BadInputError(f"There is no run {arguments.id}. `vllm-fleet runs` lists those that are kept.")
    print("\n".join(lines))
    return 0


def _accuracy(arguments: argparse.Namespace) -> int:
    from vllm_fleet import accuracy  # noqa: PLC0415  only this command needs statistics and CSV

    result = accuracy.measure(arguments.reports)
    print(json.dumps(result, indent=2) if arguments.format == "json" else accuracy.render(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())

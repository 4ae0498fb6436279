"""The command `vllm-fleet`: the planner without a host.

Exit status: 0 when it worked, 2 for bad input, 3 when no layout fits.
"""

import argparse
import json
import sys
from collections.abc import Sequence

from vllm_fleet import catalog, explain, topology
from vllm_fleet.errors import BadInputError, PlanError
from vllm_fleet.options import ACCELERATORS, OBJECTIVES
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
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    arguments = _parser().parse_args(argv)
    try:
        return int(arguments.run(arguments))
    except PlanError as error:
        print(explain.render_error(str(error), error.reasons), file=sys.stderr)
        return EXIT_BAD_INPUT if isinstance(error, BadInputError) else EXIT_NO_LAYOUT


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="vllm-fleet", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    plan = commands.add_parser("plan", help="plan a model on a saved topology", description="Plan a model on a host.")
    plan.add_argument("--model", required=True, metavar="CARD", help="name of a card in models/, or its path")
    plan.add_argument(
        "--topology", required=True, metavar="FILE", help="gpu_topology as JSON, or a folder saved by capture.yml"
    )
    plan.add_argument("--models-dir", metavar="FOLDER", help="folder of the cards")
    plan.add_argument("--format", choices=("text", "json"), default="text", help="how to print the plan")
    for name, settings in _OPTION_FLAGS:
        plan.add_argument(f"--{name.replace('_', '-')}", **settings)
    plan.set_defaults(run=_plan)
    show = commands.add_parser("topology", help="show a saved topology", description="Show a host's GPUs and links.")
    show.add_argument("topology", metavar="FILE", help="gpu_topology as JSON, or a folder saved by capture.yml")
    show.add_argument("--format", choices=("text", "json"), default="text", help="how to print it")
    show.set_defaults(run=_topology)
    compared = commands.add_parser(
        "accuracy", help="compare predicted with reported memory", description="Predicted against reported memory."
    )
    compared.add_argument("reports", metavar="CSV", help="columns as in tests/fixtures/memory/memory_reports.csv")
    compared.add_argument("--format", choices=("text", "json"), default="text", help="how to print it")
    compared.set_defaults(run=_accuracy)
    return parser


def _plan(arguments: argparse.Namespace) -> int:
    card = catalog.read_card(arguments.model, arguments.models_dir)
    options = {name: getattr(arguments, name) for name, _ in _OPTION_FLAGS}
    plan = make_plan(topology.read(arguments.topology), card, options).to_dict()
    print(json.dumps(plan, indent=2) if arguments.format == "json" else explain.render(plan))
    return 0


def _topology(arguments: argparse.Namespace) -> int:
    facts = topology.read(arguments.topology)
    host = topology.Topology.from_dict(facts, arguments.topology)
    print(json.dumps(facts, indent=2) if arguments.format == "json" else explain.render_topology(host))
    return 0


def _accuracy(arguments: argparse.Namespace) -> int:
    from vllm_fleet import accuracy  # noqa: PLC0415  only this command needs statistics and CSV

    result = accuracy.measure(arguments.reports)
    print(json.dumps(result, indent=2) if arguments.format == "json" else accuracy.render(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())

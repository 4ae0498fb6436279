"""Run by the engine's own Python: which of these argument lists its parser refuses.

Standard input: a JSON list of argument lists. Standard output: a JSON list of [arguments, error], empty when all is
well.
"""

import contextlib
import io
import json
import sys

from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.utils.argparse_utils import FlexibleArgumentParser


def refused(arguments: list[str]) -> str | None:
    """The parser's complaint, or None."""
    told = io.StringIO()
    try:
        with contextlib.redirect_stderr(told):
            validate_parsed_serve_args(make_arg_parser(FlexibleArgumentParser()).parse_args(arguments))
    except SystemExit:
        return told.getvalue().splitlines()[-1]
    except (TypeError, ValueError, KeyError) as error:
        return str(error)
    return None


json.dump([[arguments, why] for arguments in json.load(sys.stdin) if (why := refused(arguments))], sys.stdout)

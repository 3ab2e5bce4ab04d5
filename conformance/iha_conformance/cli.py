"""The `iha` command.

Nothing heavy is imported before a command needs it: `iha --help` answers at once, and frameworks
are imported only by the worker processes of their targets.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence

import click

from iha_conformance.errors import CommandError
from iha_conformance.report.output import discard_output, prepare_streams

PASSED, FAILED, FAULT, INTERRUPTED = 0, 1, 2, 130
"""Exit statuses."""

DISTRIBUTION = "interleaved-head-attention"


class InterruptError(Exception):
    """Ctrl-C, after everything that was started has been ended."""


class EndedError(BaseException):
    """SIGTERM or SIGHUP; what was started is ended on the way out, as after Ctrl-C."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def _end(number: int, _frame: object) -> None:
    raise EndedError(number)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status; every error is one line on standard error.

    Args:
        arguments: what follows the name of the command; by default those of this process.
    """
    prepare_streams()
    if threading.current_thread() is threading.main_thread():
        for name in ("SIGTERM", "SIGHUP"):
            if hasattr(signal, name) and signal.getsignal(getattr(signal, name)) is signal.SIG_DFL:
                signal.signal(getattr(signal, name), _end)
    try:
        status = iha.main(
            None if arguments is None else list(arguments), prog_name="iha", standalone_mode=False
        )
        sys.stdout.flush()
        return status if isinstance(status, int) else PASSED
    except click.ClickException as error:
        return _report_error(error.format_message())
    except CommandError as error:
        return _report_error(str(error))
    except (InterruptError, KeyboardInterrupt, click.Abort):
        _report_error("interrupted")
        return INTERRUPTED
    except EndedError as error:
        _report_error(f"ended by {signal.Signals(error.number).name}")
        return 128 + error.number
    except BrokenPipeError:
        discard_output(sys.stdout)
        return FAULT
    except OSError as error:
        discard_output(sys.stdout)
        return _report_error(f"expected files and streams that can be read and written: {error}")
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        return _report_error(
            f"fault of the kit: {type(error).__name__}: {error} ({where.filename}:{where.lineno})"
        )


def _report_error(message: str) -> int:
    with contextlib.suppress(OSError):
        print("iha: error: " + " ".join(message.split()), file=sys.stderr, flush=True)
    return FAULT


@contextlib.contextmanager
def _faults_in_one_line() -> Iterator[None]:
    """What can go wrong in a command, as errors that `main` reports."""
    from iha_conformance.corpus import CorpusError
    from iha_conformance.protocol import TargetUnavailable
    from iha_conformance.runner import HarnessError

    try:
        yield
    except KeyboardInterrupt:
        raise InterruptError from None  # click would print an empty line for it
    except TargetUnavailable as error:
        raise CommandError(str(error)) from error
    except (CorpusError, HarnessError) as error:
        raise CommandError(f"fault of the kit: {error}") from error


def _print_version(context: click.Context, _parameter: click.Parameter, wanted: bool) -> None:
    if not wanted:
        return
    from importlib.metadata import PackageNotFoundError, version

    from iha_core import SPEC_VERSION

    try:
        package = version(DISTRIBUTION)
    except PackageNotFoundError:
        package = "(not installed, run from its sources)"
    click.echo(f"iha {package}, specification IHA {SPEC_VERSION}")
    context.exit()


@click.group(invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_version,
    help="Print versions and exit.",
)
@click.pass_context
def iha(context: click.Context) -> None:
    """Hold implementations of Interleaved Head Attention to the specification.

    \b
    iha run                          everything that is installed
    iha run --target port:attention  your own function, in ./port.py
    iha run --exec "./port"          your own command, in any language
    iha case                         the cases, a line each
    iha case ID                      what a case is, and the answer it expects
    iha diagnose port:attention      what a port computes instead, axis by axis
    iha self-test                    whether the suite catches what it should
    iha vectors export DIR           the cases as files, for a port on another machine
    iha vectors check DIR OUT_DIR    judge the files that it wrote
    """
    if context.invoked_subcommand is None:
        raise click.UsageError(
            "expected a command, " + " or ".join(iha.commands) + " (see iha --help), got none"
        )


@iha.command()
@click.option(
    "--backend",
    "backends",
    multiple=True,
    metavar="NAME",
    help="A backend: torch, jax, mlx, array-api:NAMESPACE (such as numpy, array_api_strict, torch), array-api"
    " for every namespace that is installed, or jax:splash, the kernel of TPUs, interpreted elsewhere."
    " Default: all that are installed, but for jax:splash, unless --target is given."
    " Repeatable.",
)
@click.option(
    "--target",
    "callables",
    multiple=True,
    metavar="MODULE:CALLABLE",
    help="A function fn(inputs, config) on NumPy arrays; the working directory is on its import path. It"
    " returns the output, or a dict of stages with 'output' among them, and refuses by raising"
    " NotImplementedError. fn.capabilities, a set of names, asks for more: 'invalid' for cases of bad input,"
    " 'gradient' for those of gradients, by fn.vjp(inputs, config, cotangent). Repeatable.",
)
@click.option(
    "--exec",
    "commands",
    multiple=True,
    metavar="'CMD ARGS'",
    help="A command in any language, run once as CMD ARGS IN_DIR OUT_DIR, without a shell, in the working"
    " directory. IN_DIR has one safetensors file for each case and dtype; for each it writes one of the same"
    " name to OUT_DIR, or NAME.skip with the reason for refusing it (SPEC.md 8.1). Repeatable.",
)
@click.option(
    "--device",
    metavar="NAME",
    help="Device of the backends, in the framework's word: cuda, gpu, tpu, mps. Default: cpu.",
)
@click.option(
    "--precision",
    metavar="CLASS",
    help="Precision class of the products: highest, tf32, bf16x3 or bf16x1. It is set for backends, declared"
    " for callables and commands, and its limits judge all. Default: what the environment has set, judged by"
    " the limits of highest.",
)
@click.option(
    "--dtype", multiple=True, metavar="NAME", help="Only float64, float32, float16 or bfloat16. Repeatable."
)
@click.option("--family", multiple=True, metavar="NAME", help="Only cases of this family. Repeatable.")
@click.option("--case", "case_ids", multiple=True, metavar="ID", help="Only this case. Repeatable.")
@click.option("--quick", is_flag=True, help="Only the quick cases.")
@click.option(
    "--timeout",
    type=click.FloatRange(min=0, min_open=True, max=86400),
    default=60.0,
    show_default=True,
    metavar="SECONDS",
    help="Time for one case, which is computed twice; after that it fails and its process is ended. After"
    " three such cases in a row the target is not run any more and fails the rest. A command is ended if it"
    " writes no new file for that long; the cases without one fail.",
)
@click.option("--json", "json_name", metavar="FILE", help="Write the report as JSON, whole or not at all.")
@click.option(
    "--junit",
    "junit_name",
    metavar="FILE",
    help="Write the report as JUnit XML, as CI servers read it, whole or not at all.",
)
def run(
    backends: tuple[str, ...],
    callables: tuple[str, ...],
    commands: tuple[str, ...],
    device: str | None,
    precision: str | None,
    dtype: tuple[str, ...],
    family: tuple[str, ...],
    case_ids: tuple[str, ...],
    quick: bool,
    timeout: float,
    json_name: str | None,
    junit_name: str | None,
) -> int:
    """Run the suite and judge every result.

    Every case is run twice, in a process of the target's own: one that crashes or hangs fails that
    case only. A command is run once for all cases, and what it has not written when it ends has failed.

    Exit status: 0 if every executed case passed, 1 if one failed, 2 for an error of usage or of the
    kit itself, such as a backend that is not installed or no case executed.
    """
    with _faults_in_one_line():
        from iha_conformance.command import Options, run_command
        from iha_conformance.selection import Filters

        passed = run_command(
            Options(
                backends=backends,
                callables=callables,
                commands=commands,
                device=device,
                precision=precision,
                filters=Filters(dtype=dtype, family=family, case=case_ids, quick=quick),
                timeout=timeout,
                json_name=json_name,
                junit_name=junit_name,
            )
        )
    return PASSED if passed else FAILED


@iha.command()
@click.argument("case_id", metavar="[ID]", required=False)
@click.option(
    "--dtype", metavar="NAME", help="Storage dtype of inputs. Default: the first that the case has."
)
@click.option(
    "--family", multiple=True, metavar="NAME", help="Without ID: only cases of this family. Repeatable."
)
@click.option(
    "--json", "json_name", metavar="FILE", help="Write the same as JSON; large arrays are cut there, too."
)
def case(case_id: str | None, dtype: str | None, family: tuple[str, ...], json_name: str | None) -> int:
    """Print one case, or list them all.

    With ID: why it exists, its mask, inputs, stages and their limits. Without: a line for each case, with
    its flags and why it exists.

    Stages are the exact answer in float64 for these inputs, limits the largest allowed error in the
    dtype shown. Large arrays are cut; their shapes are always given. JSON has no NaN and no
    infinity; they are the strings "nan", "inf" and "-inf".
    """
    with _faults_in_one_line():
        from iha_conformance.report.json_report import open_json
        from iha_conformance.report.output import Output
        from iha_conformance.show import describe_case, list_cases

        if case_id is None and dtype is not None:
            raise CommandError(f"--dtype: expected the ID of a case to show, got none for {dtype!r}")
        if case_id is not None and family:
            raise CommandError(f"--family: expected no ID beside it, got {case_id!r}")
        shown = list_cases(family) if case_id is None else describe_case(case_id, dtype)
        with open_json(json_name) as file:
            if file is not None:
                file.write(shown.as_json())
        output = Output(sys.stdout)
        output.write(shown.render())
        output.flush()
    return PASSED


@iha.command()
@click.argument("target", metavar="[TARGET]", required=False)
@click.option(
    "--exec",
    "command",
    metavar="'CMD ARGS'",
    help="In place of TARGET: a command in any language, as for iha run. It is run several times as CMD ARGS"
    " IN_DIR OUT_DIR, since some questions depend on earlier answers.",
)
@click.option(
    "--dtype",
    metavar="NAME",
    help="Ask in float64, float32, float16 or bfloat16. Default: the first that the target takes of float32,"
    " float64, bfloat16, float16. Rules show best in float32 and float64.",
)
@click.option(
    "--device", metavar="NAME", help="Device of a backend, as for iha run: cuda, gpu, tpu, mps. Default: cpu."
)
@click.option(
    "--precision",
    metavar="CLASS",
    help="Precision class of the products: highest, tf32, bf16x3 or bf16x1. It is set for a backend, declared"
    " for a callable or a command, and its limits say what rounding explains. Default: highest.",
)
@click.option(
    "--timeout",
    type=click.FloatRange(min=0, min_open=True, max=86400),
    default=60.0,
    show_default=True,
    metavar="SECONDS",
    help="Time for one call, which is made twice; after that it counts as unanswered and its process is"
    " ended. After three such calls in a row no more are made. A command is ended if it writes no new file"
    " for that long.",
)
@click.option(
    "--fix",
    is_flag=True,
    help="Print what to do to canonical arguments, and to a checkpoint of canonical weights, so that the port"
    " as it is gives the canonical output, in lines of NumPy, as far as there is such a change.",
)
@click.option("--json", "json_name", metavar="FILE", help="Write the diagnosis as JSON, whole or not at all.")
def diagnose(
    target: str | None,
    command: str | None,
    dtype: str | None,
    device: str | None,
    precision: str | None,
    timeout: float,
    fix: bool,
    json_name: str | None,
) -> int:
    """Find out which dialect of the operation a port speaks.

    TARGET is MODULE:CALLABLE, a function fn(inputs, config) as for iha run --target, or the name of a
    backend: torch, jax, mlx, jax:splash or array-api:NAMESPACE.

    Ports differ in the order of a tensor's axes, the order of virtual tokens, mask, window, rotation, scale,
    norms and more: 21 axes. This makes some dozens of calls, names the value on each axis, and says for each
    that is not as SPEC.md has it what that means for weights and how to mend it. An axis that no answer
    settles is ambiguous. Where no dialect explains all answers it names the first stage that is wrong under
    every one of them; for that a port has to return the stages of SPEC.md chapter 4 by name.

    A canonical dialect is no pass: iha run judges rounding, extremes, ids, positions and errors, too.

    Exit status: 0 if a dialect was found, canonical or not, 1 if none explains what the target answers, 2 for
    an error of usage or of the kit itself, or a target that answers nothing.
    """
    with _faults_in_one_line():
        from iha_conformance.diagnose.command import diagnose_command

        matched = diagnose_command(
            target,
            command,
            dtype=dtype,
            device=device,
            precision=precision,
            timeout=timeout,
            json_name=json_name,
            fix=fix,
        )
    return PASSED if matched else FAILED


@iha.group(invoke_without_command=True)
@click.pass_context
def vectors(context: click.Context) -> None:
    """Test vectors: the cases as files, for ports that run elsewhere.

    `export` writes them, a port reads DIR/inputs and writes a folder of results, `check` judges it. The
    files are those of `iha run --exec` (SPEC.md chapter 8).
    """
    if context.invoked_subcommand is None:
        names = " or ".join(f"vectors {name}" for name in vectors.commands)
        raise click.UsageError(f"expected a command, {names} (see iha vectors --help), got none")


@vectors.command()
@click.argument("folder", metavar="DIR")
@click.option(
    "--dtype", multiple=True, metavar="NAME", help="Only float64, float32, float16 or bfloat16. Repeatable."
)
@click.option("--family", multiple=True, metavar="NAME", help="Only cases of this family. Repeatable.")
@click.option("--case", "case_ids", multiple=True, metavar="ID", help="Only this case. Repeatable.")
@click.option("--quick", is_flag=True, help="Only the quick cases.")
@click.option(
    "--stage",
    "stages",
    multiple=True,
    metavar="NAME",
    help="Only expected values of this stage, and of the output. Repeatable. Default: all stages, half a"
    " gigabyte for the whole corpus.",
)
@click.option(
    "--check",
    "checking",
    is_flag=True,
    help="Write nothing; compare DIR with what this machine makes, of the cases and stages that DIR has"
    " unless others are named.",
)
@click.option("--json", "json_name", metavar="FILE", help="Write the outcome as JSON.")
def export(
    folder: str,
    dtype: tuple[str, ...],
    family: tuple[str, ...],
    case_ids: tuple[str, ...],
    quick: bool,
    stages: tuple[str, ...],
    checking: bool,
    json_name: str | None,
) -> int:
    """Write the cases as files into DIR.

    DIR/inputs has what a port is given: run it as CMD DIR/inputs OUT_DIR. DIR/expected has exact values and
    limits, in files of the same names, and DIR/manifest.json says what there is, and hashes. An earlier
    export in DIR is replaced, as a whole, for which its parent folder has to be writable; anything else
    there is an error, and so is a report inside DIR. Cases of bad input cannot be files.

    Exit status: 0; with --check, 1 if DIR differs. 2 for an error of usage or of the kit itself.
    """
    with _faults_in_one_line():
        from iha_conformance.report.json_report import open_json
        from iha_conformance.report.output import Output
        from iha_conformance.selection import Filters
        from iha_conformance.vectors.export import export as write
        from iha_conformance.vectors.places import check_outside
        from iha_conformance.vectors.verify import Checked, verify

        filters = Filters(dtype=dtype, family=family, case=case_ids, quick=quick)
        check_outside(folder, {"--json": json_name})
        with open_json(json_name) as file:
            outcome = (verify if checking else write)(folder, filters, stages)
            if file is not None:
                file.write(outcome.as_json())
        output = Output(sys.stdout)
        output.write(outcome.render())
        output.flush()
    return FAILED if isinstance(outcome, Checked) and outcome.differences else PASSED


@vectors.command()
@click.argument("folder", metavar="DIR")
@click.argument("results", metavar="OUT_DIR")
@click.option(
    "--precision",
    metavar="CLASS",
    help="Precision class of the products, declared for the port: highest, tf32, bf16x3 or bf16x1. Its limits"
    " judge. Default: undeclared, judged by the limits of highest.",
)
@click.option("--json", "json_name", metavar="FILE", help="Write the report as JSON, whole or not at all.")
@click.option("--junit", "junit_name", metavar="FILE", help="Write the report as JUnit XML.")
def check(
    folder: str, results: str, precision: str | None, json_name: str | None, junit_name: str | None
) -> int:
    """Judge what a port wrote to OUT_DIR for the inputs in DIR.

    What is expected is computed anew, never read from DIR, and the inputs there have to be those that this
    kit makes. The report is that of `iha run`. Whatever lies in OUT_DIR is judged, also files of an earlier
    run: empty it before. The exit status of the port is not seen here, and is the caller's to look at: a
    port that ends with another one than 0 has failed.

    Exit status: 0 if every executed case passed, 1 if one failed or has no file, 2 for an error of usage,
    of the vectors in DIR or of the kit itself.
    """
    with _faults_in_one_line():
        from iha_conformance.vectors.check import check_command

        passed = check_command(
            folder, results, precision=precision, json_name=json_name, junit_name=junit_name
        )
    return PASSED if passed else FAILED


@iha.command("self-test")
@click.option(
    "--dtype", multiple=True, metavar="NAME", help="Only float64, float32, float16 or bfloat16. Repeatable."
)
@click.option("--json", "json_name", metavar="FILE", help="Write the outcome as JSON, whole or not at all.")
def self_test(dtype: tuple[str, ...], json_name: str | None) -> int:
    """Prove that the suite judges well, in a few minutes.

    Honest implementations that differ in legitimate ways, each installed framework's kernel among them, have
    to stay at or under half of every limit. Known-wrong ones have to exceed two limits somewhere, in every
    dtype that can show them. Every argument, parameter index and configuration value has to move some output
    by ten limits.

    Exit status: 0 if all that holds, 1 if not, 2 for an error of usage or of the kit itself.
    """
    with _faults_in_one_line():
        from iha_conformance.power.command import self_test_command

        passed = self_test_command(dtype, json_name=json_name)
    return PASSED if passed else FAILED

"""A command that tells all mistakes of its command line at once; Typer alone stops at the first."""

from contextlib import suppress
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand

from harness.errors import HarnessError, Mistakes

# Options that mean nothing without another, and those that it does not go with, by parameter. What the other command
# does not have does not matter to it.
NEEDS = {
    "metrics_url": "url",
    "ca": "url",
    "bind": "workers",
    "about": "baseline",
    "ui_port": "ui",
    "max_model_len": "model",
    "max_num_seqs": "model",
    "free": "total",
    "total": "free",
}
EXCLUDES = {
    "ui": (
        "metrics_url", "repeats", "checks", "baseline", "about", "junit", "workers", "bind", "results", "explain",
    ),
    "across": ("against", "about"),
    "history": ("against", "about", "across", "checks"),
    "image": ("free", "total"),
}  # fmt: skip
_KINDS = {"int": "a whole number", "float": "a number", "finite": "a number"}
_BOUNDS = {"ge": "a number of at least", "le": "a number of at most"}

_JUDGES = {  # what a command with JUnit output tells of at least: group and name of the case
    "report": ("validity", "the run is VALID"),
    "compare": ("comparison", "the runs can be compared"),
}


class Command(TyperCommand):
    """What every command of ours is."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """As Typer's, and what options say together. Raises HarnessError, of several mistakes SeveralErrors."""
        wrong, left = Mistakes(), []
        try:
            left = super().parse_args(ctx, list(args))
        except (typer.TyperException, HarnessError):
            self._note_mistakes(ctx, args, wrong)
        self._note_combinations(ctx, wrong)
        if wrong.found:
            with wrong.noted():
                _look_further(ctx)
        try:
            wrong.refuse()
        except HarnessError as error:
            _tell_in_junit(ctx, error, "usage", "the command line is understood")
            raise
        return left

    def invoke(self, ctx: Any) -> Any:
        """As Typer's."""
        try:
            return super().invoke(ctx)
        except typer.Exit:
            raise
        except Exception as error:
            told = error if isinstance(error, HarnessError) else HarnessError(f"{type(error).__name__}: {error}")
            _tell_in_junit(ctx, told, *_JUDGES.get(ctx.info_name, ("", "")))
            raise

    def _note_mistakes(self, ctx: Any, args: list[str], wrong: Mistakes) -> None:
        """Each parameter's, one by one, and before them the options that there are not."""
        unsure = False  # whether what stands behind an unknown option is its value
        while True:
            try:
                given, left, _ = self.make_parser(ctx).parse_args(list(args))
                break
            except typer.TyperException as error:
                wrong.add(as_told(error, ctx))
                name = getattr(error, "option_name", "")
                at = [place for place, arg in enumerate(args) if arg.split("=")[0] == name or arg[:2] == name]
                if not at:
                    return
                args = [*args[: at[-1]], *args[at[-1] + 1 :]]
                unsure = unsure or not all(arg.startswith("-") for arg in args[at[-1] : at[-1] + 1])
        for param in self.get_params(ctx):
            if param.is_eager or (unsure and param.param_type_name == "argument"):
                continue
            with wrong.noted():
                try:
                    param.handle_parse_result(ctx, given, list(left))
                except typer.TyperException as error:
                    raise as_told(error, ctx) from None
        if left and not unsure:
            wrong.add(_usage(f"got unexpected extra argument(s) ({' '.join(left)})", ctx))

    def _note_combinations(self, ctx: Any, wrong: Mistakes) -> None:
        options = {param.name: param.opts[0] for param in self.get_params(ctx)}
        given = [name for name in options if _is_given(ctx, name)]
        for name in given:
            other = NEEDS.get(name)
            if other in options and other not in given:
                said = f"{options[name]} needs {options[other]}"
                wrong.add(HarnessError(said, next_step="Give both, or neither."))
            if clash := [options[other] for other in EXCLUDES.get(name, ()) if other in given]:
                said = f"{options[name]} does not go with {', '.join(clash)}"
                wrong.add(HarnessError(said, next_step="Leave one out."))
        if "ca" in given and not (ctx.params.get("url") or "https://").startswith("https://"):
            said = "--ca: is for a server that already runs behind TLS"
            wrong.add(HarnessError(said, next_step="Give --url https://..."))


def _tell_in_junit(ctx: Any, error: HarnessError, group: str, name: str) -> None:
    """What refuses a command is on its output as well: a pipeline that keeps the output has a file that says so."""
    if ctx.params.get("output") == "junit":
        from harness.report import junit

        with suppress(BrokenPipeError):  # what it says is told all the same
            print(junit.of_error(ctx.info_name, error, group=group, name=name), end="")


def _look_further(ctx: Any) -> None:
    """Raise HarnessError for what the command would find in its scenario and checks, which does not begin."""
    from harness.prepare.experiment import Target, prepare, refuse_misplaced

    scenario, checks = ctx.params.get("scenario"), ctx.params.get("checks") or []
    if isinstance(scenario, Path):
        prepare(scenario, Target("") if _is_given(ctx, "url") else None, checks=checks)
    else:
        refuse_misplaced(checks)


def _is_given(ctx: Any, name: str) -> bool:
    return getattr(ctx.get_parameter_source(name), "name", "") == "COMMANDLINE"


def as_told(error: typer.TyperException, ctx: Any) -> HarnessError:
    """A mistake in our words: pydantic, which Typer asks, does not say which value it got."""
    found: list[dict[str, Any]] = getattr(error.__cause__, "errors", list)()
    param = getattr(error, "param", None)
    if not found or param is None:
        said = error.format_message()
        return _usage(said[:1].lower() + said[1:].rstrip("."), ctx)
    first = found[0]
    about = first.get("ctx", {})
    bound = next((f"{words} {about[key]:g}" for key, words in _BOUNDS.items() if key in about), None)
    wanted = bound or _KINDS.get(first["type"].partition("_")[0])
    if wanted is not None:
        return _usage(f"{param.opts[0]}: {wanted} is expected, got '{first['input']}'", ctx)
    return _usage(f"{param.opts[0]}: {str(about.get('error', first['msg'])).rstrip('.')}", ctx)


def _usage(what: str, ctx: Any) -> HarnessError:
    return HarnessError(what, next_step=f"`{ctx.command_path} --help` shows what there is.")

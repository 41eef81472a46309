"""The options of `harness run` that a resumed run has as well: what decides its exit code, and files of its report."""

from collections.abc import Callable
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from harness.base.command_line import command_line
from harness.cli import common as cli

_YES = "yes"  # of an option without a value


class ReportOptions(Struct, frozen=True):
    tolerance: str | None = None
    provisional: bool = False
    baseline: Path | None = None
    about: str | None = None
    junit: Path | None = None
    markdown: Path | None = None

    @property
    def share(self) -> float | None:
        """The tolerance as a share; None: not given. Raises HarnessError for a wrong one."""
        return cli.read_tolerance(self.tolerance)

    def junit_file(self) -> cli.JunitFile | None:
        return None if self.junit is None else cli.JunitFile(self.junit)

    def kept(self, runs: Path, *, is_series: bool = False) -> dict[str, str]:
        """Return what a resumed run needs of these options, by name. Raises HarnessError for a wrong one.

        `is_series`: the JUnit file has several runs, which one of them must not replace. A pipe is gone by then.
        """
        from harness.base.files import is_stream

        files = {"--junit": None if is_series else self.junit, "--markdown": self.markdown}
        base = None if self.baseline is None else cli.find_baseline(self.baseline, runs)
        values = {
            "--tolerance": None if self.share is None else self.tolerance,
            "--provisional": _YES if self.provisional else None,
            "--baseline": None if base is None else str(base.resolve()),
            "--about": self.about,
            **{
                name: None if path is None or (path.exists() and is_stream(path)) else str(path.resolve())
                for name, path in files.items()
            },
        }
        return {name: value for name, value in values.items() if value is not None}

    def with_earlier(self, folder: Path, say: Callable[[str], None]) -> "ReportOptions":
        """Return these options, and for those that are not given the ones of the run that is resumed.

        A JUnit file that has another run by now, and a file whose folder is gone, are left alone; `say` gets why.
        """
        from harness.records.directory import read_inputs, report_options
        from harness.records.manifest import read_run
        from harness.report.junit import is_document_of

        earlier, run = report_options(read_inputs(folder)), read_run(folder)
        files: dict[str, Path | None] = {}
        for name, given in (("--junit", self.junit), ("--markdown", self.markdown)):
            path = Path(earlier[name]) if name in earlier and given is None else given
            if path is not None and given is None:
                is_own = name == "--markdown" or is_document_of(path, run.id, run.scenario_name)
                if path.is_dir() or not path.parent.is_dir() or (path.exists() and not is_own):
                    resumed = command_line("harness", "run", "--resume", folder, name, path)
                    say(f"note: {path} has another run by now, or its folder is gone. To write it: {resumed}")
                    path = None
            files[name] = path
        base, about = self.baseline, self.about
        if base is None and "--baseline" in earlier:
            base, about = Path(earlier["--baseline"]), earlier.get("--about")
        return replace(
            self,
            tolerance=self.tolerance or earlier.get("--tolerance"),
            provisional=self.provisional or earlier.get("--provisional") == _YES,
            baseline=base,
            about=about,
            junit=files["--junit"],
            markdown=files["--markdown"],
        )

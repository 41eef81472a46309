"""The command `harness plan`."""

from typing import Annotated

import typer

from harness.base.errors import ExitCode
from harness.cli import common as cli


@cli.command(short_help="Predict how long a number of items takes.")
def plan(
    run_folder: cli.RunArg,
    items: Annotated[str, cli.option("N", "How many items, such as 500000 or 500k; one request is one item.")],
    deadline: Annotated[str | None, cli.option("TIME", "Until when it must be done, such as 8h or 90min.")] = None,
    price: Annotated[str | None, cli.option("PRICE", "Price of energy, such as 0.30/kWh: adds the cost.")] = None,
    as_json: cli.JsonOpt = False,
    runs: cli.RunsDir = cli.RUNS,
) -> None:
    """Predict time, energy and cost of N items on the machine of a finished run, each with a 90 % interval.

    With --deadline exit code 0 when a row meets it, else 4 when the fastest row misses it, and 5 when the deadline is
    inside its interval or no interval is known, as with too few requests.
    """
    from harness.base.units import read_count, read_duration
    from harness.questions.plan.decide import forecast, read_price
    from harness.questions.plan.page import forecast_page
    from harness.records import run_data
    from harness.report.terminal import print_page

    folder, number = cli.find_run(run_folder, runs), read_count("--items", items)
    predicted = forecast(
        run_data.load(folder),
        number,
        deadline_s=None if deadline is None else read_duration("--deadline", deadline),
        price_per_kwh=None if price is None else read_price(price),
    )
    if as_json:
        cli.print_json(predicted)
    else:
        print_page(forecast_page(predicted), cli.console())
    if predicted.rows[0].deadline == "missed":
        raise typer.Exit(ExitCode.FAILED)
    if predicted.rows[0].deadline == "inconclusive":
        raise typer.Exit(ExitCode.INCONCLUSIVE)

"""The commands, by name."""

import typer

from cetane.cli import bench, build, demo, info, inspect, plan, port, run, train_head, validate

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Port language models to Apple's Neural Engine from any machine.",
)
app.command()(inspect.inspect)
app.command()(plan.plan)
app.command()(port.port)
app.command()(demo.demo)
app.command()(build.build)
app.command()(validate.validate)
app.command()(run.run)
app.command()(bench.bench)
app.command()(train_head.train_head)
app.command()(info.info)

"""The store of a data folder, opened for one command."""

import click

from services.config import Settings
from services.kv.view import StoreView


def open_view(settings: Settings) -> StoreView:
    """Says on stderr which tiers are left out. Raises `SetupError` if there is no store."""
    view = StoreView.open(settings.kv)
    click.get_current_context().call_on_close(view.close)
    for why in view.left_out:
        click.echo(f"kvrelay: what lies in redis is left out: {why}", err=True)
    return view

"""`gpulease serve` with all that is in it."""

from gpulease.client.cli.serve import serve as serve
from gpulease.client.cli.serve_models import models

serve.add_command(models)

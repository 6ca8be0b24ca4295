"""Write docs/metrics.md, or with `alerts` deploy/alerts.yml: `python -m tokenbus_services.metrics [alerts]`."""

import sys

from tokenbus_services.metrics.document import page, rules

_WRITERS = {"page": page, "alerts": rules}

sys.stdout.write(_WRITERS[(sys.argv[1:] or ["page"])[0]]())

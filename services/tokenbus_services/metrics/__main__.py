"""Write what follows from the metrics: `python -m tokenbus_services.metrics > docs/metrics.md`.

With `alerts` the rules in deploy/alerts.yml, with `dashboard` the one in deploy/grafana/dashboards/tokenbus.json.
"""

import sys

from tokenbus_services.metrics.dashboard import dashboard
from tokenbus_services.metrics.document import page, rules

_WRITERS = {"page": page, "alerts": rules, "dashboard": dashboard}

sys.stdout.write(_WRITERS[(sys.argv[1:] or ["page"])[0]]())

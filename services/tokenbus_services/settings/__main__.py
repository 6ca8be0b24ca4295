"""Write the page of all settings: `python -m tokenbus_services.settings > docs/settings.md`."""

import sys

from tokenbus_services.settings.document import page

sys.stdout.write(page())

"""`python -m pccheckctl`."""

import sys

from pccheckctl.cli import main

sys.exit(main())

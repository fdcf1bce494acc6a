"""`python -m pccheckctl`."""

import sys

from .cli import main

sys.exit(main())

"""`python -m coreset_sampler.cli`, the same as `coreset-sampler`."""

import sys

from .main import main

sys.exit(main())

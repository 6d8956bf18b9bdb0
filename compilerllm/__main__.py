"""``python -m compilerllm`` is the command line."""

import sys

from compilerllm.cli.main import main

sys.exit(main())

"""Writes a campaign's report: ``gh200_report.py ROOT [--protocol VERSION|FILE] [--partial]``."""

import sys

from tinyllm.acceptance.report import main

if __name__ == "__main__":
    sys.exit(main())

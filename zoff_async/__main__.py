"""``python -m zoff_async`` is ``zoff``."""

from zoff_async.cli import main

raise SystemExit(main())

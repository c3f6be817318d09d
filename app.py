"""Redline's entry point: reads the options and opens the page.

Run: ``python app.py [--host HOST] [--port PORT] [--db FILE] [--share]``
"""

from app.launch import main

if __name__ == "__main__":
    raise SystemExit(main())

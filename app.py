"""Redline's entry point: reads the options and opens the page.

Run: ``python app.py [--host HOST] [--port PORT] [--db FILE] [--share]
    [--pair NAME | --target MODEL [--draft MODEL]] [--quantize FORM] [--draft-quantize FORM] [--device NAME]
    [--dtype NAME]``
"""

from app.launch import main

if __name__ == "__main__":
    raise SystemExit(main())

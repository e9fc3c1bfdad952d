"""Load for the gateway: real traces (`manage.py replay`) and made-up waves (`manage.py demo_traffic`).

- `prompts`   prompts of an exact number of tokens
- `client`    one streamed completion, timed and judged
- `sender`    requests at a trace's own times, whatever becomes of those before (open loop)
- `report`    the closing table
- `ledger_check` a key for the run, and the comparison with the server's ledger
- `waves`     demo traffic
"""

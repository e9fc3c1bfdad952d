"""Display titles of forecasters and strategies."""

TITLES = {
    "seasonal_naive": "Seasonal naive",
    "arima": "ARIMA",
    "seasonal_arima": "Seasonal ARIMA",
    "ets": "ETS",
    "mlstm": "mLSTM",
    "lt_i": "LT-I",
    "lt_u": "LT-U",
    "lt_ua": "LT-UA",
    "preserve": "PreServe",
    "plan": "Plan",
    "fcfs": "FCFS",
    "edf": "EDF",
    "ssjf": "SSJF",
    "qlm": "QLM",
    "srpt": "SRPT",
    "vtc": "VTC",
    "wfq": "WFQ",
    "what_if": "What-if",
}


def title_of(name: str) -> str:
    """Return `seasonal_arima` as "Seasonal ARIMA"; names without a title are written as words."""
    words = name.replace("_", " ").replace("-", " ").strip()
    return TITLES.get(name, words[:1].upper() + words[1:])

"""Names of forecasters and strategies as people read them."""

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
    "what_if": "What-if",
}


def title_of(name: str) -> str:
    """`seasonal_arima` as "Seasonal ARIMA"; a name without a title of its own is written as words."""
    words = name.replace("_", " ").replace("-", " ").strip()
    return TITLES.get(name, words[:1].upper() + words[1:])

"""Load for the gateway: real traces (`manage.py replay`) and made-up waves (`manage.py demo_traffic`)."""

"""Load for the gateway: real traces (`manage.py replay`) and synthetic waves (`manage.py demo_traffic`)."""

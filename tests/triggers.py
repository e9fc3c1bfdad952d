"""A database that refuses some rows."""

from django.db import connection


def refuse(table: str, event: str, when: str, raises: str = "RAISE EXCEPTION 'not this one'") -> None:
    """Have each *event* ("INSERT" or "UPDATE") of *table* refused *when* an expression of NEW is true.

    *raises*: PostgreSQL's statement; SQLite knows one error alone.
    """
    with connection.cursor() as cursor:
        if connection.vendor == "postgresql":
            cursor.execute(
                f"CREATE FUNCTION refuse() RETURNS trigger AS $$ BEGIN IF {when} THEN {raises}; END IF; "
                "RETURN NEW; END $$ LANGUAGE plpgsql"
            )
            cursor.execute(f"CREATE TRIGGER refuse BEFORE {event} ON {table} FOR EACH ROW EXECUTE FUNCTION refuse()")
        else:
            cursor.execute(
                f"CREATE TRIGGER refuse BEFORE {event} ON {table} WHEN {when} "
                "BEGIN SELECT RAISE(ABORT, 'not this one'); END"
            )


def stop_refusing() -> None:
    with connection.cursor() as cursor:
        postgresql = connection.vendor == "postgresql"
        cursor.execute("DROP FUNCTION refuse CASCADE" if postgresql else "DROP TRIGGER refuse")

"""`manage.py up`: one supervisor for every process of a single-machine stack.

- `state`         the state folder: secret key, who holds the folder, where Redis is
- `screen`        what a person reads: one line a part, children's output with their names
- `child`         one child process, its output and its end, also when the supervisor itself is killed
- `keeper`        starts parts, waits until they are ready, starts them again, stops them in order
- `redis_server`  which Redis the stack uses
- `prepare`       migrations, static files, demo rows, the sign-in link: a child, and the only module that needs Django
- `stack`         what the stack consists of
"""

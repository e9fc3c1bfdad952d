"""The life of an instance: its states, how and where its server is started, when it is started again."""

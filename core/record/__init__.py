"""The record: the database's schema, writing replies, reading them, deleting, and the tables made of them."""

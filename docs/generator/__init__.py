"""The pages of docs/reference that are made from the code when the site is built; docs/hook.py adds them to it."""

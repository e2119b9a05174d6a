"""TorchServe archives: unpacked, checked, migrated, and served by their own handlers.

Nothing else imports it but `cli`; `loading.loaders` finds its loader by name.
"""

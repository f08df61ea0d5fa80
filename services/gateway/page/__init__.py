"""The start page's one file, `index.html`."""

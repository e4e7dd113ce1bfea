"""The content of a bundle's page, as data: a file for each group of sections.

It holds every figure of the page: drawing computes nothing. The same data is written as JSON beside
the page.
"""

"""The operations in plain torch: the definition that every faster implementation is checked against.

Each row of each result is a function of that row's own inputs, bit for bit, whatever rows are beside it and however
many threads work on it. So no operation here may choose its order of additions by the number of rows.
"""

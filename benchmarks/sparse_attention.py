"""What a small part of the keys costs, by who chooses it (`cetane.lab.sparse`).

    python benchmarks/sparse_attention.py MODEL [--length 1536] [--budgets 128 256 512]

The first part of a text is a prompt with full attention; the last 256 tokens read only `budget`
keys in all layers but the first two. Of two texts, one is documentation. The other ends with its
own beginning, so that the next token stands far away.
"""

import torch

from cetane.checkpoint import open_checkpoint
from cetane.gates.reference import Reference
from cetane.lab.sparse import CHOOSERS, DECODED, Sparse, against, both_texts, run
from common import arguments, report, standard_library_text


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--length", type=int, default=1536)
    parser.add_argument("--budgets", type=int, nargs="+", default=[128, 256, 512])
    options = parser.parse_args()
    checkpoint = open_checkpoint(options.model)
    model = Reference(checkpoint).model
    ids = checkpoint.tokenizer.encode(
        standard_library_text().read_text("utf-8")[: 8 * options.length]
    )
    rows = []
    for kind, text in both_texts(ids, options.length).items():
        name = kind or "documentation"
        full = run(model, text, Sparse())
        target = torch.tensor(text[1:])[-DECODED + 1 :]
        rows.append([name, "all keys", options.length, *against(full, full, target), 1.0])
        for budget in options.budgets:
            for chooser, function in CHOOSERS.items():
                sparse = Sparse(function, budget)
                figures = against(run(model, text, sparse), full, target)
                rows.append(
                    [
                        name or "documentation",
                        chooser,
                        budget,
                        *figures,
                        sum(sparse.mass) / len(sparse.mass),
                    ]
                )
                print(rows[-1], flush=True)
    columns = ["text", "keys", "budget", "perplexity", "KL", "same token", "attention kept"]
    report("sparse attention", columns, [[*r[:3], *(f"{x:.3f}" for x in r[3:])] for r in rows],
           {"rows": rows}, options.json)  # fmt: skip


if __name__ == "__main__":
    main()

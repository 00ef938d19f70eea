"""The format of a run directory, with its reader and writer. Standard library only.

Nothing here trains or draws: the engine writes run directories, and the report reads them.

| file | holds | written |
|---|---|---|
| `run.json` | the facts of the run, keys below | whole, atomically |
| `steps.jsonl` | a JSON object per optimizer step | appended, a line each |
| `epochs.jsonl` | a JSON object per evaluation | appended, a line each |
| `diagnostics.jsonl` | a JSON object per measurement of the layers (`--observe`) | appended, a line each |
| `outcome.json` | the result of the run; absent until it ends | whole, atomically |
| `predictions.json` | predictions for a few test samples | whole, atomically |

Facts: `format` (1), `recipe` (str), `settings`, `execution`, `data`, `environment` (objects), `revision` (str or null),
`command` (str), `date` (ISO 8601), and any others, such as `resumptions`. For a recipe, `paper` holds the paper's
figures under the names of the run's own, or null, and `title` its row in words. `collapse` (str) is the warning of a
run that collapsed in its first steps; see `find_collapse`.

A row of steps: `step` (completed steps, from 1), `epoch` (from 0), `loss`, `lr`, `samples`, `seconds`, `micro_batch`,
`memory` (bytes or null), and any counts. A row of epochs: `epoch` (from 0), `step`, `seconds`, and the figures `train`
and `test`.

A row of diagnostics: `step`, `epoch`, and `layers`: by the name of each measured layer, an object with its `kind` and
figures. Kind "norm": `norm` (the class), `channels`, `groups`, `stat_diff` and `stat_diff_worst` (the mean
and the largest over groups), `sigma_mean` and `sigma_std` (the spread of the normalized channels' means and
deviations), `active` (the share of positive outputs), `dead` and `rare` (counts of channels that are never, or hardly
ever, active). Kind "weight": `weight` (the reparameterization, "none" for a plain one), `along`, `mean`, `rest` and
`residual` (the shares of the squared gradient), `norm` and `grad` (of W). A figure that was not measured is absent.

Predictions: `samples`, a list of objects with `height`, `width` and `channels` (1 or 3) of a small picture, `pixels`
(base64 of its bytes, row by row, the channels of a pixel together), `label` and `prediction` (str), and `probability`
(the network's confidence in its prediction). A prediction that is a picture itself, such as a label map or boxes, has
instead of size and pixels three PNG or JPEG files in base64: `image`, `truth` and `answer`. `label` and `prediction`
say in words what these show. Optional: `note` (how good the answer is, in a few words) and `colours` (an object: the
colour of each class that occurs, such as "#80ff00").

JSON has no NaN and no infinity: they are written as {"float": "nan"}, {"float": "inf"} and {"float": "-inf"}. Floats
are read back exactly as they were.
"""

from micronorm.records.collapse import CollapseWatch, find_collapse
from micronorm.records.files import PARTIAL, Row, is_number, remove_partials, sync_folder, write_atomically
from micronorm.records.run import (
    DIAGNOSTICS,
    EPOCHS,
    FACTS,
    FORMAT,
    OUTCOME,
    PREDICTIONS,
    STEPS,
    Record,
    Run,
    find_runs,
    read,
    write_predictions,
)

__all__ = [
    "DIAGNOSTICS",
    "EPOCHS",
    "FACTS",
    "FORMAT",
    "OUTCOME",
    "PARTIAL",
    "PREDICTIONS",
    "STEPS",
    "CollapseWatch",
    "Record",
    "Row",
    "Run",
    "find_collapse",
    "find_runs",
    "is_number",
    "read",
    "remove_partials",
    "sync_folder",
    "write_atomically",
    "write_predictions",
]

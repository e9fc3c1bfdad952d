from django.db import migrations


class Migration(migrations.Migration):

    dependencies = [("batches", "0002_batch_epoch")]

    operations = [migrations.RemoveField(model_name="batch", name="urgent_by")]
